"""What a server written for ExLlamaV3 does, under either name of the package.

Run as `python -m tests.engine.tabby_scenario exllamav3` with the alias installed, or imported by
the tests under the name `exl3`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.unit import conformance_table as table

TINY = Path(__file__).parents[1] / "fixtures" / "golden" / "tiny_llama_exl3"
READ = """stage eos text token_ids token_probs top_k_tokens top_k_probs eos_reason prompt_tokens
    new_tokens cached_tokens time_enqueued time_prefill time_generate"""


class Server:
    """Loads as the server does and runs jobs."""

    def __init__(self, root: str) -> None:
        self.root = root
        assert importlib.util.find_spec(root) is not None
        version = importlib.import_module(f"{root}.version").__version__.split("+")[0]
        assert root == "exl3" or tuple(map(int, version.split("."))) >= (1, 4, 1)
        self.exl = importlib.import_module(root)
        self.sampler_module = importlib.import_module(f"{root}.generator.sampler")
        exl = self.exl
        self.config = exl.Config.from_directory(str(TINY))
        assert "vision" not in self.config.model_classes
        self.model = exl.Model.from_config(self.config)
        self.config.infer_params.moe_cpu_offload = 0
        assert not self.model.caps.get("recurrent_states")
        assert self.model.caps.get("default_draft_size", 4) == 4
        self.cache = exl.Cache(self.model, max_num_tokens=4096, max_batch_size=128, max_history=4)
        self.tokenizer = exl.Tokenizer.from_config(self.config)
        self.progress: list[tuple[int, int]] = []

    def load(self) -> None:
        """Every step on another thread."""
        seen: list[tuple[int, int]] = []
        steps = self.model.load_gen(
            tensor_p=False,
            tp_backend="native",
            reserve_per_device=[0.09375],
            use_per_device=None,
            callback=lambda done, total: seen.append((done, total)),
            max_chunk_size=512,
            max_batch_size=4,
        )
        while True:
            with ThreadPoolExecutor(1) as pool:
                item = pool.submit(next, steps, None).result()
            if item is None:
                break
            self.progress.append(item)
        total = len(self.model.modules)
        assert self.progress == seen == [(i, total) for i in range(total + 1)]

    def start(self) -> None:
        self.generator = self.exl.AsyncGenerator(
            model=self.model,
            cache=self.cache,
            draft_model=None,
            draft_cache=None,
            tokenizer=self.tokenizer,
            max_batch_size=8,
            max_chunk_size=512,
            recurrent_cache_size=0,
            cpu_cache_size=0,
            num_draft_tokens=None,
            dynamic_draft_tokens=False,
            ngram_match_min=0,
        )
        inner = self.generator.generator
        assert (inner.max_batch_size, inner.recurrent_cache) == (8, None)

    def sampler(self, temperature: float = 0.0) -> Any:
        s = self.sampler_module
        steps = [
            s.SS_LogitBias({5: 0.5}),
            s.SS_RepP(1.05, 64, 1),
            s.SS_PresFreqP(0.0, 0.0, 64, 1),
            s.SS_BanTokens([9]),
        ]
        if not temperature:
            return s.CustomSampler([*steps, s.SS_Argmax()])
        cuts = [s.SS_TopK(40), s.SS_TopP(0.95), s.SS_MinP(0.01), s.SS_Temperature(temperature)]
        xtc = s.SS_XTC(0.0, 0.1, tokenizer=self.tokenizer)
        return s.CustomSampler([*steps, *cuts, xtc, s.SS_AdaptiveP(0.4, 0.9)])

    def ids(self, length: int, seed: int = 0) -> torch.Tensor:
        source = torch.Generator().manual_seed(seed)
        return torch.randint(3, 500, (1, length), generator=source)

    def job(self, ids: torch.Tensor, **more: Any) -> Any:
        options: dict[str, Any] = {
            "sampler": self.sampler(),
            "input_ids": [ids],
            "max_new_tokens": 12,
            "min_new_tokens": 0,
            "token_healing": False,
            "decode_special_tokens": True,
            "stop_conditions": [],
            "banned_strings": [],
            "embeddings": [],
            "return_top_tokens": 3,
            "return_probs": True,
            "max_rq_tokens": None,
            "stop_on_loop": (800, 2),
            "filters": [],
        }
        return self.exl.AsyncJob(self.generator, **{**options, **more})

    async def finish(self, job: Any) -> tuple[str, torch.Tensor, dict[str, Any]]:
        """Text, tokens and last event, merged as the server does."""
        text, tokens, last = "", [], {}
        async for result in job:
            while not job.queue.empty():  # what is there already is merged
                more = job.queue.get_nowait()
                if isinstance(more, BaseException):
                    raise more
                assert isinstance(more, dict)
                result = self.merge(result, more)
            if result["stage"] == "streaming":
                text += result.get("text", "")
                if "token_ids" in result:
                    tokens.append(result["token_ids"])
                    count = result["token_ids"].shape[-1]
                    assert result["token_probs"].shape == (1, count)
                    assert result["top_k_tokens"].shape == (1, count, 3)
                    assert result["top_k_probs"].shape == (1, count, 3)
                    assert (result["token_probs"].log() <= 1e-6).all()
                    pieces = self.tokenizer.get_id_to_piece_list(True)
                    assert all(pieces[i] is not None for i in result["top_k_tokens"].flatten())
                last = result
        assert last["eos"] and set(READ.split()) - set(last) <= {
            "text", "token_ids", "token_probs", "top_k_tokens", "top_k_probs",
        }  # fmt: skip
        assert all(isinstance(last[f"time_{k}"], float) for k in ("enqueued", "prefill"))
        return text, torch.cat(tokens, -1) if tokens else torch.zeros(1, 0), last

    @staticmethod
    def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        if first["stage"] != "streaming" or second["stage"] != "streaming":
            return {**first, **second}
        out = {**first, **second}
        if "text" in first or "text" in second:
            out["text"] = first.get("text", "") + second.get("text", "")
        for key in ("token_ids", "token_probs", "top_k_tokens", "top_k_probs"):
            parts = [event[key] for event in (first, second) if key in event]
            if parts:
                out[key] = torch.cat(parts, 1)
        return out


async def same_with_and_without_requeue(server: Server) -> None:
    ids = server.ids(300)
    plain = await server.finish(server.job(ids, max_new_tokens=400))
    again = await server.finish(server.job(ids, max_new_tokens=400, max_rq_tokens=100))
    assert plain[0] == again[0] and torch.equal(plain[1], again[1])
    for key in ("new_tokens", "prompt_tokens"):
        assert plain[2][key] == again[2][key]
    assert plain[1].shape[-1] == plain[2]["new_tokens"] == 400
    assert again[2]["cached_tokens"] == 299


async def each_reason(server: Server) -> None:
    ids, encode = server.ids(20), server.tokenizer.encode
    stop = 7

    async def forced(tokens: torch.Tensor, **more: Any) -> dict[str, Any]:
        job = server.job(ids, **more)
        assert hasattr(job, "constrain_output_now")
        job.constrain_output_now(tokens)
        return (await server.finish(job))[2]

    word = encode("hello")
    last = {
        "max_new_tokens": await forced(word, max_new_tokens=2),
        "stop_token": await forced(torch.tensor([[11, stop]]), stop_conditions=["zz", stop]),
        "stop_string": await forced(word, stop_conditions=[stop, "ell"], max_new_tokens=99),
        "loop_detected": await forced(
            torch.tensor([[11, 12] * 8]), stop_on_loop=(8, 2), max_new_tokens=30
        ),
    }
    if importlib.util.find_spec("llguidance"):
        guided = server.exl.LLGuidanceFilter(server.tokenizer, eos_after_completed=True, regex="ab")
        job = server.job(ids, filters=[guided])
        last["end_filter"] = (await server.finish(job))[2]
    for reason, event in last.items():
        assert event["eos_reason"] == reason
        wanted = f"{table.EVENT_KEYS['eos']} {table.EVENT_KEYS[reason]}".split()
        assert set(wanted) <= set(event), reason
    assert last["stop_token"]["eos_triggering_token_id"] == stop
    assert last["stop_string"]["eos_triggering_string"] == "ell"


async def cancel_everywhere(server: Server) -> None:
    jobs = [server.job(server.ids(900, i), max_new_tokens=40) for i in range(4)]
    inner = server.generator.generator
    await jobs[3].cancel()  # queued
    await asyncio.sleep(0)
    while not inner.active_jobs or not jobs[0].job.sequences[0].input_ids:
        await asyncio.sleep(0)
    await jobs[0].cancel()  # in prefill
    async for event in jobs[1]:
        if event["stage"] == "streaming":
            break
    await jobs[1].cancel()  # decoding
    _, tokens, last = await server.finish(jobs[2])
    await jobs[2].cancel()  # finished
    await jobs[2].cancel()
    assert tokens.shape[-1] == last["new_tokens"] == 40
    assert jobs[0].cancelled and jobs[3].cancelled and inner.num_remaining_jobs() == 0
    assert not server.generator.jobs and [e async for e in jobs[3]] == []
    inner.check_integrity()


async def shared_prefix(server: Server) -> None:
    ids = server.ids(700, 9)
    other = torch.cat([ids[:, :600], server.ids(50, 10)], 1)
    first, second = server.job(ids), server.job(other)
    done = await asyncio.gather(server.finish(first), server.finish(second))
    assert done[0][2]["cached_tokens"] + done[1][2]["cached_tokens"] >= 512
    third = await server.finish(server.job(other))
    assert third[2]["cached_tokens"] == 649 and third[0] == done[1][0]


async def schema_next_to_plain(server: Server) -> None:
    if not importlib.util.find_spec("llguidance"):
        return
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    guided = server.exl.LLGuidanceFilter(
        server.tokenizer, eos_after_completed=True, trigger_token=None, json_schema=schema
    )
    ids = server.ids(30, 3)
    alone = await server.finish(server.job(ids))
    hot = server.sampler(0.8)
    pair = (
        server.job(ids, filters=[guided], max_new_tokens=200, sampler=hot, seed=1),
        server.job(ids),
    )
    both = await asyncio.gather(*map(server.finish, pair))
    gap = r"( |\n {0,20})?"  # white space is bounded
    pattern = gap.join([r"\{", '"a"', ":", '"[xy]"', r"\}"])
    assert re.fullmatch(pattern, both[0][0]), both[0][0]
    assert both[0][2]["eos_reason"] == "end_filter" and both[1][0] == alone[0]


async def failure_and_rebuild(server: Server) -> None:
    job = server.job(server.ids(20))
    forward, server.model.forward = server.model.forward, None
    try:
        await server.finish(job)
        raise AssertionError("the failure did not surface")
    except TypeError:
        assert server.generator.error is not None
    finally:
        server.model.forward = forward
    dead = server.job(server.ids(20))
    try:
        await server.finish(dead)
        raise AssertionError("a job of a dead generator hung or ran")
    except TypeError:
        pass
    old = server.generator
    server.start()
    await dead.cancel()
    assert (await server.finish(server.job(server.ids(20))))[2]["new_tokens"] == 12
    await old.close()
    try:
        server.job(server.ids(5000))
    except AssertionError as error:
        assert "cannot be enqueued" in str(error)
    assert (await server.finish(server.job(server.ids(20))))[2]["new_tokens"] == 12


async def scenario(root: str) -> None:
    """The whole list of section 13."""
    server = Server(root)
    server.load()
    server.start()
    for part in (
        same_with_and_without_requeue,
        each_reason,
        cancel_everywhere,
        shared_prefix,
        schema_next_to_plain,
        failure_and_rebuild,
    ):
        await asyncio.wait_for(part(server), 60)
    server.model.unload()
    await asyncio.wait_for(server.generator.close(), 20)


if __name__ == "__main__":
    from exl3.compat import install_alias

    install_alias()
    asyncio.run(scenario(sys.argv[1]))
