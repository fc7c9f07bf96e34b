"""Tokens drawn for many conversations at once, each at a place of its own: one that ends makes room for the next.

Deals in tokens, keys and values on one device. A step of one token for every slot works on buffers of fixed size, so
that on a GPU it is recorded once as a CUDA graph and replayed: a small model's step is otherwise mostly its launches.
Weights may change between two calls, in place. Knows nothing about texts.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from qimeng.finetune.kernels import ANY_LENGTH, exact_logits
from qimeng.finetune.weights import FinetuneError

LOOK = 16
"""Steps after which is looked at which conversations have ended."""

SHORTEST = 512
"""Tokens that attention reads at least; beyond it, as many as a power of two."""

FILLED = 32_768
"""Tokens of prompts, padding included, that are read at once."""

ATTENTION = "qimeng_slots"
"""Name of `_attention` among those of transformers."""

Drawn = tuple[list[int], torch.Tensor]
"""The tokens of a reply, and the log-probability that each had (float32, on the CPU)."""


class Decoder:
    """Draws replies.

    Args:
        model: a causal language model of `transformers`, without an adapter or with one, in evaluation mode when asked.
        end: token that ends a reply; it is part of it.
        slots: conversations at once.
        length: most tokens of prompt and reply together; decides the memory of keys and values.
        temperature: of sampling; 0 takes the likeliest tokens, and gives their log-probabilities at a temperature of 1.
        mixed: whether a GPU computes in bfloat16 whatever the weights are; else in the weights' own dtype.

    Raises:
        FinetuneError: the model's layers do not attend to all tokens before.
    """

    def __init__(self, model: Any, end: int, *, slots: int, length: int, temperature: float = 1.0, mixed: bool = True):
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attention)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        check_attention(base.config, length)
        self._base, self._head = base.base_model, base.get_output_embeddings()
        takes = inspect.signature(self._base.forward).parameters
        self._named = "cache" if "cache" in takes else "past_key_values"
        self.end, self.slots, self.length, self.temperature = end, slots, length, temperature
        self.device = self._head.weight.device
        self.mixed = mixed and self.device.type == "cuda"
        self.graphs = self.device.type == "cuda"
        self._recorded: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._cache = _Slots(
            base.config, slots, length, torch.bfloat16 if self.mixed else self._head.weight.dtype, self.device
        )
        numbers: dict[str, Any] = {"dtype": torch.long, "device": self.device}
        self._ids = torch.zeros(slots, **numbers)  # the last token of each
        self._counts = torch.zeros(slots, **numbers)  # tokens drawn
        self._limits = torch.zeros(slots, **numbers)
        self._live = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self._tokens = torch.zeros(slots, length + 1, **numbers)  # the last column takes what nobody reads
        self._unread = torch.full((slots,), length, **numbers)  # a number would be copied, which no graph records
        self._scores = torch.zeros(slots, length + 1, device=self.device)
        self._noise = torch.ones(slots, self._head.weight.shape[0], device=self.device)
        self._rows = torch.arange(slots, device=self.device)

    @torch.no_grad()
    def draw(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[Drawn]:
        """A reply to each prompt, of at most as many tokens as its limit, at least one.

        The state of PyTorch's generator decides what is drawn.

        Raises:
            ValueError: a prompt is empty, a limit below 1, or the two together are longer than the length.
        """
        for prompt, limit in zip(prompts, limits, strict=True):
            if not prompt or limit < 1 or len(prompt) + limit > self.length:
                text = f"a prompt of {len(prompt)} tokens and a reply of {limit} in a length of {self.length}"
                raise ValueError(f"{text}: prompts have a token, replies too, and both fit the length")
        waiting = deque(sorted(range(len(prompts)), key=lambda n: (-len(prompts[n]), n)))
        owned: dict[int, int] = {}  # by slot, the number of its prompt
        reach: dict[int, int] = {}  # by slot, how far it may have come
        found: dict[int, Drawn] = {}
        self._live.zero_()
        with self._computed():
            while waiting or owned:
                free = [s for s in range(self.slots) if s not in owned]
                if waiting and len(free) >= min(len(waiting), max(1, self.slots // 8)):
                    for slot in free[: len(waiting)]:
                        owned[slot] = waiting.popleft()
                        reach[slot] = len(prompts[owned[slot]])
                    self._begin({s: owned[s] for s in free if s in owned}, prompts, limits)
                reach = {s: n + LOOK for s, n in reach.items() if s in owned}
                seen = min(self.length, max(SHORTEST, 1 << (max(reach.values()) - 1).bit_length()))
                for _ in range(LOOK):
                    self._replay(seen)
                live = self._live.tolist()
                ended = [slot for slot in owned if not live[slot]]
                found |= {owned.pop(slot): drawn for slot, drawn in zip(ended, self._taken(ended), strict=True)}
        return [found[n] for n in range(len(prompts))]

    @contextmanager
    def _computed(self) -> Iterator[None]:
        """With `_attention`. No weights are kept in another dtype: they would be old when the graph is replayed."""
        config = self._base.config
        usual = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed, cache_enabled=False):
                yield
        finally:
            config._attn_implementation = usual

    def _taken(self, slots: Sequence[int]) -> list[Drawn]:
        """What these slots hold."""
        if not slots:
            return []
        some = torch.tensor(slots, device=self.device)
        counts = self._counts[some].tolist()
        most = max(counts)
        tokens, scores = self._tokens[some, :most].tolist(), self._scores[some, :most].cpu()
        return [(t[:n], s[:n].clone()) for t, s, n in zip(tokens, scores, counts, strict=True)]

    def _begin(self, owned: dict[int, int], prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Read the prompts of these slots, and draw their first tokens."""
        left = list(owned)
        while left:
            longest = len(prompts[owned[left[0]]])
            each = max(1, FILLED // longest)
            some, left = left[:each], left[each:]
            slots = torch.tensor(some, device=self.device)
            lengths = torch.tensor([len(prompts[owned[s]]) for s in some], device=self.device)
            longest = max(len(prompts[owned[s]]) for s in some)
            ids = torch.tensor(
                [[*prompts[owned[s]], *[0] * (longest - len(prompts[owned[s]]))] for s in some], device=self.device
            )
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)  # none is made, none is needed
            places = torch.arange(longest, device=self.device).expand(len(some), -1)
            self._cache.filling = slots
            hidden = self._hidden(ids, mask, places)
            self._cache.filling = None
            last = hidden[torch.arange(len(some), device=self.device), lengths - 1]
            self._counts[slots] = 0
            self._limits[slots] = torch.tensor([limits[owned[s]] for s in some], device=self.device)
            self._cache.places[slots] = lengths - 1  # a token that is put moves on by one
            tokens, scores = torch.zeros_like(self._ids), torch.zeros_like(self._scores[:, 0])
            tokens[slots], scores[slots] = self._chosen(last, self._drawn_noise()[slots])
            self._put(tokens, scores, torch.zeros_like(self._live).index_fill_(0, slots, True))

    def _hidden(self, ids: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        read = self._base(
            input_ids=ids, attention_mask=mask, position_ids=places, use_cache=True, **{self._named: self._cache}
        )
        hidden: torch.Tensor = read.last_hidden_state
        return hidden

    def _drawn_noise(self) -> torch.Tensor:
        """Exponential noise: the largest of p / noise is a draw from p. Ones where the likeliest token is wanted."""
        return self._noise.exponential_() if self.temperature else self._noise

    def _chosen(self, hidden: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens drawn after `hidden` (n x width), and their log-probabilities."""
        scores = (exact_logits(self._head, hidden) / (self.temperature or 1.0)).log_softmax(-1)
        token = (scores - noise.log()).argmax(-1)
        return token, scores.gather(1, token[:, None])[:, 0]

    def _put(self, token: torch.Tensor, score: torch.Tensor, going: torch.Tensor) -> None:
        """Write a token (slots) where the reply of each slot in `going` (slots) goes on; others stay as they are."""
        column = torch.where(going, self._counts, self._unread)
        self._tokens[self._rows, column] = token
        self._scores[self._rows, column] = score
        self._ids.copy_(torch.where(going, token, self._ids))
        self._counts.add_(going)
        self._cache.places.add_(going)
        on = (token != self.end) & (self._counts < self._limits)
        self._live.copy_(torch.where(going, on, self._live))

    def _step(self, seen: int) -> None:
        """One more token for each slot that has not ended; attention reads `seen` tokens."""
        self._cache.seen = seen
        places = self._cache.places
        mask = (torch.arange(seen, device=self.device)[None] <= places[:, None])[:, None, None]
        hidden = self._hidden(self._ids[:, None], mask, places[:, None])[:, -1]
        self._put(*self._chosen(hidden, self._noise), self._live)

    def _replay(self, seen: int) -> None:
        """`_step`, recorded where that is possible."""
        self._drawn_noise()
        if self.graphs and seen not in self._recorded:
            try:
                self._recorded[seen] = self._record(seen)
            except RuntimeError as error:  # slower, and still right
                warnings.warn(f"the step is not recorded as a CUDA graph: {error}", stacklevel=2)
                self.graphs = False
                torch.cuda.synchronize(self.device)
        if seen in self._recorded:
            self._recorded[seen].replay()
        else:
            self._step(seen)

    def _record(self, seen: int) -> torch.cuda.CUDAGraph:
        """The graph of `_step`. Slots count as ended meanwhile, so that nothing goes on."""
        live = self._live.clone()
        self._live.zero_()
        try:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._step(seen)
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()  # graphs do not run side by side
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(seen)
            return graph
        finally:
            self._live.copy_(live)


def check_attention(config: Any, length: int) -> None:
    """Refuse a model some layers of which see less than the last `length` tokens: here they would see all of them.

    Raises:
        FinetuneError: it is one.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if kinds != {"full_attention"} else None
    other = kinds - {"full_attention", "sliding_attention"}
    if other or (window is not None and window < length):
        reason = f"layers of {', '.join(sorted(other))}" if other else f"a window of {window} tokens"
        text = f"models of the kind {config.model_type!r} have {reason}, with which no replies are drawn here"
        raise FinetuneError(f"{text}: take a model whose layers see all {length} tokens")


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over whole prompts, or of one token each over keys and values that are not copied for each head.

    Args:
        module: the layer.
        query: (rows x heads x tokens x width); with one token, the heads that share keys become its tokens.
        key: (rows x shared heads x tokens x width).
        value: like `key`.
        attention_mask: what one token sees (rows x 1 x 1 x tokens).
        scaling: of the products.
    """
    rows, heads, tokens, width = query.shape
    attend = torch.nn.functional.scaled_dot_product_attention
    if tokens > 1:
        with sdpa_kernel(ANY_LENGTH):
            found = attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
        found = attend(grouped, key, value, attn_mask=attention_mask, scale=scaling).reshape(rows, heads, 1, width)
    return found.transpose(1, 2).contiguous(), None


class _Slots:
    """Keys and values of each slot, as a model's layers put them there and read them.

    Attributes:
        places: where the next token of each slot goes (slots).
        seen: tokens that are read.
        filling: slots whose prompts are read now; None in a step of one token.
    """

    def __init__(self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (slots, heads, length, width)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self._layers = [
            (torch.zeros(shape, **kind), torch.zeros(shape, **kind)) for _ in range(config.num_hidden_layers)
        ]
        self._rows = torch.arange(slots, device=device)
        self.places = torch.zeros(slots, dtype=torch.long, device=device)
        self.seen, self.filling = length, None  # type: int, torch.Tensor | None

    def get_seq_length(self, *_: Any) -> int:
        """Models ask for it, and then take the places that they are given."""
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values (rows x heads x tokens x width) of a layer; all that attention reads."""
        keys, values = self._layers[layer]
        if self.filling is not None:
            keys[self.filling, :, : key.shape[2]] = key.to(keys.dtype)
            values[self.filling, :, : value.shape[2]] = value.to(values.dtype)
            return key, value
        keys[self._rows, :, self.places] = key[:, :, 0].to(keys.dtype)
        values[self._rows, :, self.places] = value[:, :, 0].to(values.dtype)
        return keys[:, :, : self.seen], values[:, :, : self.seen]


__all__ = ["Decoder", "Drawn", "check_attention"]
