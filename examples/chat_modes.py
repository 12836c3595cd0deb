"""Prompt formats of `chat.py`, as data. Each follows the published template of its family."""

from __future__ import annotations

from dataclasses import dataclass, replace

HELPFUL = "You are a helpful assistant."


@dataclass(frozen=True, slots=True)
class Mode:
    """How a conversation becomes text.

    `turn` None: the model's own template writes the text. `turn_with_system`, if given, is the
    first turn of families that have no place of its own for a system prompt.
    """

    family: str
    turn: str | None = None
    after_answer: str = ""
    start: str = ""
    system: str = ""
    turn_with_system: str = ""
    bos: bool = False
    think: tuple[str, str] | None = ("<think>", "</think>")
    no_think: str = ""  # after the last turn, unless thinking
    do_think: str = ""  # after the last turn, when thinking
    past_think: str = ""  # before older answers, whose own reasoning is left out then
    effort: tuple[str, str] = ("", "")  # after the system prompt: without reasoning, with it
    stops: tuple[str, ...] = ()
    default_system: str = HELPFUL

    def render(self, turns: list[tuple[str, str]], system: str, *, think: bool) -> str:
        """Text of a conversation; the answer of the last turn may be incomplete or empty."""
        text = self.start
        own_place = bool(system) and not self.turn_with_system
        if own_place:
            text += self.system.replace("{system}", system)
        text += self.effort[think]
        for index, (user, answer) in enumerate(turns):
            first = index == 0 and bool(system) and bool(self.turn_with_system)
            form = self.turn_with_system if first else self.turn or ""
            text += form.replace("{system}", system).replace("{user}", user)
            last = index == len(turns) - 1
            if last:
                text += (self.do_think if think else self.no_think) + answer
            else:
                text += self.past(answer) + self.after_answer
        return text

    def past(self, answer: str) -> str:
        """An older answer as the model is to read it."""
        if not self.past_think or self.think is None:
            return answer
        return self.past_think + answer.rpartition(self.think[1])[2].lstrip("\n")


_CHATML = Mode(
    family="Qwen and others",
    system="<|im_start|>system\n{system}<|im_end|>\n",
    turn="<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n",
    after_answer="<|im_end|>\n",
    think=("<think>\n", "</think>"),
    stops=("<|im_end|>",),
)
_COHERE_TURN = "<|START_OF_TURN_TOKEN|>"
_COHERE_END = "<|END_OF_TURN_TOKEN|>"
_COHERE = Mode(
    family="Command R",
    bos=True,
    system=f"{_COHERE_TURN}<|SYSTEM_TOKEN|>{{system}}{_COHERE_END}",
    turn=f"{_COHERE_TURN}<|USER_TOKEN|>{{user}}{_COHERE_END}{_COHERE_TURN}<|CHATBOT_TOKEN|>",
    after_answer=_COHERE_END,
    stops=(_COHERE_END,),
)
_HY = "<｜hy_{}:opensource｜>"
_HY_EFFORT = "<｜reasoning_mode:opensource｜>reasoning_effort:"
_LLAMA_ROLE = "<|start_header_id|>{}<|end_header_id|>\n\n"

MODES: dict[str, Mode] = {
    "auto": Mode(family="the model's own template", default_system=""),
    "raw": Mode(
        family="plain text",
        bos=True,
        system="{system}\n",
        turn="{user_name}: {user}\n{bot_name}:",
        after_answer="\n",
        stops=("{user_name}:", "\n{user_name}:", "{user_name} :", "\n{user_name} :"),
        default_system="This is a conversation between {user_name} and {bot_name}, who helps.",
    ),
    "llama3": Mode(
        family="Llama 3",
        bos=True,
        system=_LLAMA_ROLE.format("system") + "{system}<|eot_id|>",
        turn=_LLAMA_ROLE.format("user") + "{user}<|eot_id|>" + _LLAMA_ROLE.format("assistant"),
        after_answer="<|eot_id|>",
        stops=("<|eot_id|>", "<|start_header_id|>"),
    ),
    "chatml": _CHATML,
    "qwen35": replace(_CHATML, family="Qwen3.5", no_think="<think>\n\n</think>\n\n"),
    "phi": Mode(
        family="Phi 3/4",
        bos=True,
        system="<|system|>\n{system}<|end|>\n",
        turn="<|user|>\n{user}<|end|>\n<|assistant|>\n",
        after_answer="<|end|>\n",
        stops=("<|end|>",),
    ),
    "mistral": Mode(
        family="Mistral v3",
        bos=True,
        turn="[INST] {user}[/INST]",
        turn_with_system="[INST] {system}\n\n{user}[/INST]",
        after_answer="</s>",
        default_system="",
    ),
    "mistral3": Mode(
        family="Mistral 3, Ministral",
        bos=True,
        system="[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT]",
        turn="[INST]{user}[/INST]",
        after_answer="</s>",
        think=("[THINK]", "[/THINK]"),
    ),
    "gemma": Mode(
        family="Gemma 2/3",
        bos=True,
        turn="<start_of_turn>user\n{user}<end_of_turn>\n<start_of_turn>model\n",
        turn_with_system="<start_of_turn>user\n{system}\n\n{user}<end_of_turn>\n"
        "<start_of_turn>model\n",
        after_answer="<end_of_turn>\n",
        stops=("<end_of_turn>", "<start_of_turn>"),
        default_system="",
    ),
    "gemma4": Mode(
        family="Gemma 4",
        bos=True,
        system="<|turn>system\n{system}<turn|>\n",
        turn="<|turn>user\n{user}<turn|>\n<|turn>model\n",
        after_answer="<turn|>\n",
        think=("<|channel>thought", "<channel|>"),
        stops=("<eos>", "<turn|>"),
    ),
    "glm": Mode(
        family="GLM 4",
        start="[gMASK]<sop>",
        system="<|system|>\n{system}",
        turn="<|user|>\n{user}<|assistant|>\n",
        stops=("<|user|>", "<|observation|>", "</answer>"),
    ),
    "reka": Mode(
        family="Reka Flash 3",
        turn="human: {user} <sep> assistant:",
        turn_with_system="human: {system} {user} <sep> assistant:",
        after_answer=" <sep> ",
        think=("<reasoning>", "</reasoning>"),
        stops=("<sep>",),
        default_system="",
    ),
    "dots": Mode(
        family="dots",
        system="<|system|>{system}<|endofsystem|>",
        turn="<|userprompt|>{user}<|endofuserprompt|><|response|>",
        after_answer="<|endofresponse|>",
        think=("<|sec-cot|>", "<|sec-end-cot|>"),
        stops=("<|endofresponse|>",),
    ),
    "ernie": Mode(
        family="ERNIE 4.5",
        bos=True,
        system="{system}\n",
        turn="User: {user}\nAssistant: ",
        after_answer="<|end_of_sentence|>",
        stops=("<|end_of_sentence|>",),
    ),
    "exaone": Mode(
        family="EXAONE 4",
        system="[|system|]{system}[|endofturn|]\n",
        turn="[|user|]{user}[|endofturn|]\n[|assistant|]",
        after_answer="[|endofturn|]\n",
        stops=("[|endofturn|]",),
    ),
    "seed": Mode(
        family="Seed-OSS",
        system="<seed:bos>system\n{system}<seed:eos>",
        turn="<seed:bos>user\n{user}<seed:eos><seed:bos>assistant\n",
        after_answer="<seed:eos>",
        think=("<seed:think>", "</seed:think>"),
        stops=("<seed:eos>",),
    ),
    "apertus": Mode(
        family="Apertus",
        system="<|system_start|>{system}<|system_end|>",
        turn="<|user_start|>{user}<|user_end|><|assistant_start|>",
        after_answer="<|assistant_end|>",
        think=None,
        stops=("<|assistant_end|>",),
    ),
    "minimax": Mode(
        family="MiniMax",
        start="]~!b[",
        system="]~b]system\n{system}[e~[\n",
        turn="]~b]user\n{user}[e~[\n]~b]ai\n",
        after_answer="[e~[\n",
        stops=("[e~[",),
    ),
    "gptoss": Mode(
        family="GPT-OSS (Harmony)",
        system="<|start|>system<|message|>{system}<|end|>",
        turn="<|start|>user<|message|>{user}<|end|><|start|>assistant",
        after_answer="<|end|>",
        think=None,
        stops=("<|return|>",),
    ),
    "hy3": Mode(
        family="Hy3",
        start=_HY.format("begin_of_sentence"),
        system="{system}",
        effort=(_HY_EFFORT + "no_think", _HY_EFFORT + "high"),
        turn=_HY.format("User") + "{user}" + _HY.format("Assistant"),
        after_answer=_HY.format("eos"),
        think=("<think:opensource>", "</think:opensource>"),
        no_think="<think:opensource></think:opensource>",
        do_think="<think:opensource>",
        past_think="<think:opensource></think:opensource>",
        default_system="",
    ),
    "laguna": Mode(family="Laguna 2.1, by its own template", default_system=""),
    "kimi": Mode(
        family="Kimi, Moonlight",
        system="<|im_system|>system<|im_middle|>{system}<|im_end|>",
        turn="<|im_user|>user<|im_middle|>{user}<|im_end|><|im_assistant|>assistant<|im_middle|>",
        after_answer="<|im_end|>",
        think=("<think>\n", "</think>"),
        stops=("<|im_end|>",),
    ),
    "deepseek": Mode(
        family="DeepSeek",
        start="<｜begin▁of▁sentence｜>",
        system="{system}",
        turn="<｜User｜>{user}<｜Assistant｜>",
        after_answer="<｜end▁of▁sentence｜>",
        think=("<think>\n", "</think>"),
        stops=("<｜User｜>",),
        default_system="",
    ),
    "ds4": Mode(
        family="DeepSeek V4",
        start="<｜begin▁of▁sentence｜>",
        system="{system}",
        turn="<｜User｜>{user}<｜Assistant｜>",
        after_answer="<｜end▁of▁sentence｜>",
        think=("<think>\n", "</think>"),
        no_think="</think>",
        do_think="<think>",
        past_think="</think>",
        stops=("<｜User｜>",),
        default_system="",
    ),
    "cohere": _COHERE,
    "commanda": replace(
        _COHERE,
        family="Command A",
        turn=(_COHERE.turn or "") + "<|START_RESPONSE|>",
        after_answer="<|END_RESPONSE|>" + _COHERE_END,
        stops=("<|END_RESPONSE|>", _COHERE_END),
    ),
    "smollm3": replace(_CHATML, family="SmolLM3", think=("<think>", "</think>")),
}


def mode_of(name: str, user_name: str, bot_name: str) -> Mode:
    """The mode with the names of a raw conversation filled in."""
    mode = MODES[name]

    def fill(text: str) -> str:
        return text.replace("{user_name}", user_name).replace("{bot_name}", bot_name)

    return replace(
        mode,
        turn=None if mode.turn is None else fill(mode.turn),
        stops=tuple(fill(stop) for stop in mode.stops),
        default_system=fill(mode.default_system),
    )
