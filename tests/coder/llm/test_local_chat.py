"""A model of transformers in this process: templates, batches, seeds, adapters, what it cannot do."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest

from qimeng.coder.llm import local_chat
from qimeng.coder.llm.chat import ChatError, Message
from qimeng.coder.llm.local_chat import LocalChat
from qimeng.device_lock import DeviceLock
from tests.coder.llm.models import STRICT, make_model

ASKED = [Message("system", "you write"), Message("user", "write")]
OTHER = [Message("user", "something longer than that")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chat(folder: Path) -> LocalChat:
    return LocalChat(folder, max_tokens=6, batch=2, device="cpu")


def test_answers(chat: LocalChat) -> None:
    first = list(chat.ask(ASKED, 3))
    assert len(first) == 3 and len({r.text for r in first}) == 3
    assert all(r.prompt_tokens == len("you writewrite") + 5 and 0 <= r.reply_tokens <= 6 for r in first)
    assert {r.finish for r in first} <= {"stop", "length"} and all(r.seconds > 0 for r in first)
    again = list(chat.ask(ASKED, 3))
    assert [r.text for r in again] == [r.text for r in first]
    assert [r.text for r in chat.ask(OTHER, 3)] != [r.text for r in first]


def test_answers_to_many(chat: LocalChat, folder: Path) -> None:
    """Padding to the longest conversation changes no answer."""
    replies = chat.ask_many([ASKED, OTHER, ASKED])
    assert [r.prompt_tokens for r in replies] == [19, len(OTHER[0].text) + 3, 19]
    greedy = LocalChat(folder, max_tokens=6, temperature=0, device="cpu")
    together = [r.text for r in greedy.ask_many([ASKED, OTHER])]
    assert together == [next(iter(greedy.ask(m))).text for m in (ASKED, OTHER)]


def test_a_conversation_that_is_too_long(chat: LocalChat) -> None:
    with pytest.raises(ChatError, match="takes 240") as caught:
        list(chat.ask([Message("user", "x" * 300)]))
    assert caught.value.kind == "too-long"
    (reply,) = chat.ask([Message("user", "x" * 230)])  # what is left is what it may say
    assert reply.prompt_tokens + reply.reply_tokens <= 256


@pytest.mark.parametrize("template", [STRICT, None], ids=["no system's turn", "no template"])
def test_models_that_know_less(template: str | None, tmp_path: Path) -> None:
    chat = LocalChat(make_model(tmp_path, template=template), max_tokens=4, device="cpu")
    (reply,) = chat.ask(ASKED)
    text = "you write\n\nwrite" if template else "system: you write\n\nuser: write\n\nassistant: "
    assert reply.prompt_tokens == len(text) + (3 if template else 0)


def test_an_adapter(folder: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=2, target_modules=["q_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=5.0)
    model.save_pretrained(tmp_path)
    plain, adapted = (LocalChat(n, temperature=0, max_tokens=8, device="cpu") for n in (folder, f"{folder}+{tmp_path}"))
    assert adapted.name == f"transformers:{folder}+{tmp_path}" and plain.settings != adapted.settings
    assert (plain.adapter, adapted.adapter) == ("", str(tmp_path))
    (reply,) = adapted.ask(ASKED)
    assert reply.reply_tokens <= 8 and hasattr(adapted._load()[1], "peft_config")


def test_other_weights_in_the_same_folder_are_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = LocalChat(tmp_path).settings
    (tmp_path / "config.json").write_text("{} ")
    assert LocalChat(tmp_path).settings != before


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="there is no folder /no/such/place") as caught:
        LocalChat("/no/such/place")
    assert caught.value.kind == "setup"
    with pytest.raises(ChatError, match="cannot be loaded") as caught:
        list(LocalChat(tmp_path).ask(ASKED))
    assert caught.value.kind == "setup"


def test_a_copy_has_no_weights(chat: LocalChat) -> None:
    assert copy.deepcopy(chat)._loaded is None and repr(chat).startswith("LocalChat(")


def test_it_stops_writing_for_who_measures(chat: LocalChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, that is; here on a lock of the test's own."""
    path, events = str(tmp_path / "lock"), []

    class Lock(DeviceLock):
        measuring: threading.Thread | None = None

        def step_aside(self) -> None:
            events.append("token")
            if len(events) == 1:
                Lock.measuring = threading.Thread(target=measure)
                Lock.measuring.start()
                while not self.wanted:
                    pass
            super().step_aside()

    def measure() -> None:
        lock = DeviceLock(path)
        with lock.alone():
            events.append("measured")
        lock.close()

    expected = [r.text for r in chat.ask(ASKED, 2)]
    monkeypatch.setattr(local_chat, "DeviceLock", Lock)
    monkeypatch.setattr(local_chat, "_lock_path", lambda device: path)
    assert [r.text for r in chat.ask(ASKED, 2)] == expected
    assert Lock.measuring is not None
    Lock.measuring.join()
    assert events[:3] == ["token", "measured", "token"]
