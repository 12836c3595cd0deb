"""The state of a chat: turns, what they look like to the model, and what fits."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat_modes import Mode
from torch import Tensor

from exl3.constants import PAGE_SIZE

DEFAULT_FILE = Path.home() / "chat_py_session.json"
_CODE = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)


@dataclass
class Session:
    """One conversation."""

    tokenizer: Any
    mode: Mode
    cache_tokens: int
    max_response: int
    system_prompt: str = ""
    think: bool = False
    negative_system: str | None = None  # of the negative prompt, where answers are guided
    banned: list[str] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)

    def prompts(self) -> list[Tensor]:
        """The conversation and, where answers are guided, what they are led away from."""
        systems = [self.system_prompt]
        if self.negative_system is not None:
            systems.append(self.negative_system)
        return [self.ids(system) for system in systems]

    def ids(self, system_prompt: str) -> Tensor:
        """The conversation as the model reads it, up to where it goes on."""
        if self.mode.turn is not None:
            text = self.mode.render(self.turns, system_prompt, think=self.think)
            return self.tokenizer.encode(text, add_bos=self.mode.bos, encode_special_tokens=True)
        messages = []
        if system_prompt:
            messages.append({"role": "system", "content": system_prompt})
        for user, answer in self.turns:
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": answer})
        begun = messages.pop()["content"]
        text = self.tokenizer.hf_render_chat_template(
            messages, add_generation_prompt=True, enable_thinking=self.think
        )
        return self.tokenizer.encode(text + begun, encode_special_tokens=True)

    def fit(self) -> tuple[list[Tensor] | None, int]:
        """Prompts that leave room for an answer, and how many old turns were dropped to get there.

        At least a third of the cache is freed at once. None if the last turn alone cannot fit; it
        is dropped then.
        """
        prompts, dropped = self.prompts(), 0
        if self._places(prompts) <= self.cache_tokens:
            return prompts, 0
        room = min(self.cache_tokens, self.cache_tokens * 2 // 3 + self.max_response)
        while self._places(prompts) > room and len(self.turns) > 1:
            self.turns.pop(0)
            dropped += 1
            prompts = self.prompts()
        if self._places(prompts) > self.cache_tokens:
            self.turns.pop()
            return None, dropped
        return prompts, dropped

    def _places(self, prompts: list[Tensor]) -> int:
        """Places in the cache that prompts and answer take; a second prompt has its own pages."""
        first, *rest = (ids.shape[-1] + self.max_response for ids in prompts)
        return first + sum(-(-places // PAGE_SIZE) * PAGE_SIZE for places in rest)

    def stop_conditions(self, config: Any) -> list[int | str]:
        return [*config.eos_token_id_list, *self.mode.stops]

    def last_answer(self) -> str:
        return self.turns[-1][1] if self.turns else ""

    def code_blocks(self) -> list[str]:
        """Code blocks of the last answer."""
        return _CODE.findall(self.last_answer())

    def save(self, path: Path) -> None:
        values = {
            "system_prompt": self.system_prompt,
            "banned_strings": self.banned,
            "context": self.turns,
        }
        path.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Raises OSError, or ValueError if the file is not a saved session."""
        values = json.loads(path.read_text(encoding="utf-8"))
        try:
            turns = [(str(user), str(answer or "")) for user, answer in values["context"]]
            system, banned = str(values["system_prompt"]), list(values["banned_strings"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a saved session: {error!r}") from error
        self.turns, self.system_prompt, self.banned = turns, system, banned
