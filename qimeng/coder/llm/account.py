"""The budget of a model, and what it has cost so far.

Deals in calls, tokens and money. Knows nothing about requests or servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from qimeng.coder.llm.chat import ChatError, Message, Reply

CHARACTERS_A_TOKEN = 4
"""Used where a server does not say how many tokens it read and wrote."""


@dataclass(frozen=True)
class Allowance:
    """What a model may be asked for; None is no limit.

    Attributes:
        calls: answers.
        tokens: read and written together.
        money: in the currency of the prices.
    """

    calls: int | None = None
    tokens: int | None = None
    money: float | None = None


@dataclass(frozen=True)
class Prices:
    """What a million tokens cost, in any currency.

    Attributes:
        prompt: tokens read.
        reply: tokens written.
    """

    prompt: float = 0.0
    reply: float = 0.0

    def of(self, prompt_tokens: int, reply_tokens: int) -> float:
        """The price of so many tokens.

        >>> Prices(2.0, 8.0).of(500_000, 250_000)
        3.0
        """
        return (prompt_tokens * self.prompt + reply_tokens * self.reply) / 1e6


@dataclass
class Account:
    """The running account of one model.

    An answer from the store counts like the first time, so a resumed run ends where the whole run would have ended.
    Such answers are counted apart (`replayed`). The limits are checked before each request. Answers on their way may
    exceed the limits on tokens and money, but never on calls.

    Args:
        allowance: what may be used.
        prices: what it costs.

    Attributes:
        calls: answers.
        replayed: of these, answers from the store, which cost nothing now.
        prompt_tokens: tokens read.
        reply_tokens: tokens written.
        paid: money spent now; `money` counts what was replayed as well.
        seconds: that answers took.
        failures: class of failure to how often.

    Raises:
        ValueError: an allowance of money without prices.
    """

    allowance: Allowance = Allowance()
    prices: Prices = Prices()
    calls: int = 0
    replayed: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    paid: float = 0.0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Refuse limits that nothing can reach."""
        if self.allowance.money is not None and self.prices == Prices():
            raise ValueError("a limit on money needs the prices of a million tokens (read and written)")

    @property
    def tokens(self) -> int:
        """Tokens read and written."""
        return self.prompt_tokens + self.reply_tokens

    @property
    def money(self) -> float:
        """Price of all answers, those from the store included."""
        return self.prices.of(self.prompt_tokens, self.reply_tokens)

    def room(self, count: int) -> int:
        """How many of `count` answers may be asked for.

        Raises:
            ChatError: (``"budget"``) none.
        """
        allowed = self.allowance
        for what, used, most in (
            ("calls", self.calls, allowed.calls),
            ("tokens", self.tokens, allowed.tokens),
            ("money", self.money, allowed.money),
        ):
            if most is not None and used >= most:
                raise ChatError(f"the model's budget is used up: {used:.6g} of {most:.6g} {what}", "budget")
        return count if allowed.calls is None else min(count, allowed.calls - self.calls)

    def add(self, messages: Sequence[Message], reply: Reply, replayed: bool = False) -> None:
        """Add an answer; if no tokens were counted, they are estimated from the characters."""
        read = reply.prompt_tokens or _tokens(*(m.text for m in messages))
        written = reply.reply_tokens or _tokens(reply.text)
        self.calls += 1
        self.prompt_tokens += read
        self.reply_tokens += written
        if replayed:
            self.replayed += 1
        else:
            self.paid += self.prices.of(read, written)
            self.seconds += reply.seconds

    def __str__(self) -> str:
        text = f"{self.calls} answers ({self.replayed} from the store), {self.tokens} tokens, {self.seconds:.1f} s"
        if self.prices != Prices():
            text += f", {self.money:.4f} spent in all, {self.paid:.4f} now"
        if self.failures:
            text += "; " + ", ".join(f"{kind} {n}" for kind, n in sorted(self.failures.items()))
        return text


def _tokens(*texts: str) -> int:
    return -(-sum(map(len, texts)) // CHARACTERS_A_TOKEN)


__all__ = ["Account", "Allowance", "Prices"]
