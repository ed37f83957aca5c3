"""Chats about a long text. All take a turn before any takes the next: the worst order for a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

BLOCK = 32  # tokens; a token is a byte (see model.py)
ANSWER = 16
DEVICE_SHARE = 3  # the device holds a third of what the chats need

_SYSTEM = "system: You are the clerk of a warehouse. Here is a log; answer the questions about it, in one line.\n"
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_WHO = ("the night shift", "the early shift", "the driver from the coast", "the new forklift", "the harbour crew")
_DID = ("moved", "counted", "returned", "unloaded", "mislaid", "repacked")
_WHAT = ("crates of lemons", "pallets of paper", "barrels of oil", "boxes of lamps", "sacks of coffee")
_QUESTIONS = (
    "What did {who} do on {day}?",
    "How many {what} were there on {day}?",
    "Who was at gate {gate} on {day}?",
)


@dataclass(frozen=True)
class Workload:
    sessions: int = 8
    turns: int = 3
    text_tokens: int = 1000

    @property
    def blocks_of_a_chat(self) -> int:
        """At its end. The last token that was generated is in no cache, but may as well count."""
        longest = max(len(self.prompt(session, _no_answers(self.turns))) for session in range(self.sessions))
        return -(-(longest + ANSWER) // BLOCK)

    @property
    def device_blocks(self) -> int:
        """A third of all chats, yet one whole; and one more, which vLLM never gives out."""
        return max(self.sessions * self.blocks_of_a_chat // DEVICE_SHARE, self.blocks_of_a_chat) + 1

    @property
    def host_blocks(self) -> int:
        """All chats, and some room."""
        return self.sessions * self.blocks_of_a_chat * 5 // 4

    @property
    def max_model_len(self) -> int:
        return self.blocks_of_a_chat * BLOCK

    def prompt(self, session: int, answers: Sequence[str]) -> str:
        """What a chat server sends the model: all that was said, and the next question."""
        chat = f"{_SYSTEM}user: {self._text(session)}\n"
        for turn in range(len(answers) + 1):
            chat += f"user: {_question(session, turn)}\nassistant: "
            if turn < len(answers):
                chat += f"{answers[turn]}\n"
        return chat

    def _text(self, session: int) -> str:
        """So many letters, the same every time, of a log that no other session has."""
        numbers = Random(f"text/{session}")
        text = f"Log of warehouse {session}."
        while len(text) < self.text_tokens:
            day, who, did, what = (numbers.choice(each) for each in (_DAYS, _WHO, _DID, _WHAT))
            text += f" On {day} {who} {did} {numbers.randrange(2, 90)} {what} at gate {numbers.randrange(1, 9)}."
        return text[: self.text_tokens]


def warm_up_prompt(workload: Workload) -> str:
    """As long as the others, and like none of them."""
    return "".join(Random("warm-up").choices("abcdefghijklmnopqrstuvwxyz ", k=workload.text_tokens))


def _question(session: int, turn: int) -> str:
    numbers = Random(f"question/{session}/{turn}")
    return _QUESTIONS[turn % len(_QUESTIONS)].format(
        day=numbers.choice(_DAYS),
        who=numbers.choice(_WHO),
        what=numbers.choice(_WHAT),
        gate=numbers.randrange(1, 9),
    )


def _no_answers(turns: int) -> list[str]:
    """As long as answers are, for the last turn of a chat."""
    return ["?" * ANSWER] * (turns - 1)
