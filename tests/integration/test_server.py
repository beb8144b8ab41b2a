"""mlx_lm.server with the plugin: parallel chats, and chats that leave their beginnings behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load

from spark25_mlx.model import Model

from .conftest import greedy

ANSWER = 24
Messages = list[dict[str, str]]


class Server:
    """A running `spark25-mlx server`."""

    def __init__(self, checkpoint: Path, *flags: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "spark25_mlx.cli", "server", "--model", str(checkpoint)]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--log-level", "ERROR", *flags],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            except OSError:
                assert self.process.poll() is None, self.process.communicate()[1]
                time.sleep(0.1)
        raise TimeoutError

    def chat(self, messages: Messages, tokens: int = ANSWER) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0.0, "logprobs": True}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def stop(self) -> str:
        self.process.terminate()
        return self.process.communicate()[1]


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    server = Server(checkpoint)
    yield server
    assert "Traceback" not in server.stop()


@pytest.fixture(scope="module")
def model_and_tokenizer(checkpoint: Path) -> tuple[Any, Any]:
    from spark25_mlx import plugin

    assert plugin.enable()
    model, tokenizer = load(str(checkpoint))[:2]
    assert type(model) is Model
    return model, tokenizer


def tokens_of(reply: dict[str, Any]) -> list[int]:
    return [entry["id"] for entry in reply["choices"][0]["logprobs"]["content"]]


def cached(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def alone(model_and_tokenizer: tuple[Any, Any], messages: Messages) -> list[int]:
    """The answer of a cold run, up to the end of the turn."""
    model, tokenizer = model_and_tokenizer
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokens = greedy(model, prompt, ANSWER)
    ends = [i for i, token in enumerate(tokens) if token in tokenizer.eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def test_parallel_chats(server: Server, model_and_tokenizer: tuple[Any, Any]) -> None:
    """Eight at a time, of lengths up to nine windows."""
    chats: list[Messages] = [
        [{"role": "user", "content": f"{i} {'tell me more ' * n}"}]
        for i, n in enumerate((0, 3, 45, 1, 12, 7, 20, 2))
    ]
    with ThreadPoolExecutor(len(chats)) as pool:
        replies = list(pool.map(server.chat, chats))
    for chat, reply in zip(chats, replies, strict=True):
        assert tokens_of(reply) == alone(model_and_tokenizer, chat)


@pytest.mark.parametrize("thought", [20, 200], ids=["trimmed", "by a snapshot"])
def test_a_chat_that_goes_on(server: Server, model_and_tokenizer: tuple[Any, Any], thought: int) -> None:
    """The thought is not sent back, so each request leaves the stored text where the last answer began."""
    messages: Messages = [
        {"role": "system", "content": f"{thought} be brief " * 20},
        {"role": "user", "content": "what is a ring buffer " * 10},
    ]
    first = server.chat(messages, thought)
    assert first["usage"]["completion_tokens"] == thought
    turns = [{"role": "assistant", "content": "it is a buffer"}]
    turns.append({"role": "user", "content": "and what is it good for"})
    reply = server.chat([*messages, *turns])
    assert tokens_of(reply) == alone(model_and_tokenizer, [*messages, *turns])
    # All but <BOS><|Bot|><think>.
    assert cached(reply) >= first["usage"]["prompt_tokens"] - 3
    print(f"\ncached {cached(reply)} of the first request's {first['usage']['prompt_tokens']} prompt tokens")


def test_another_question_under_the_same_system_prompt(
    server: Server, model_and_tokenizer: tuple[Any, Any]
) -> None:
    system = {"role": "system", "content": "answer like a pirate " * 30}
    chats: list[Messages] = [
        [system, {"role": "user", "content": f"{question} " * 15}] for question in ("who", "where")
    ]
    server.chat(chats[0])
    reply = server.chat(chats[1])
    assert tokens_of(reply) == alone(model_and_tokenizer, chats[1])
    assert cached(reply) > 600
    again = server.chat(chats[1])
    assert tokens_of(again) == tokens_of(reply)
    assert cached(again) == reply["usage"]["prompt_tokens"] - 1


def test_draft_model(checkpoint: Path, model_and_tokenizer: tuple[Any, Any]) -> None:
    """One request after the other; the store then holds both models' caches."""
    server = Server(checkpoint, "--draft-model", str(checkpoint), "--num-draft-tokens", "3")
    try:
        messages: Messages = [{"role": "user", "content": "why " * 40}]
        for content in ("x", "y"):
            messages = [*messages[:1], {"role": "user", "content": content}]
            assert tokens_of(server.chat(messages)) == alone(model_and_tokenizer, messages)
    finally:
        assert "Traceback" not in server.stop()
