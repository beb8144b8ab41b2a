"""Train the tiny Spark checkpoint in examples/tiny from the help topics that come with Python.

The result has the published layout, tensor names, special tokens and turn format, so that every part of the
plugin can be tried without a download. It needs matplotlib beside the plugin. Run from the repository's root:

    python examples/make_tiny.py

The data order depends on (seed, step) alone, so an interrupted run that is started again goes on from its
last save. The chat template is the only input file; everything else in examples/tiny is written here.

On Linux without a GPU, mlx's wheel uses the reference BLAS. With OpenBLAS in its place the run takes half an
hour on two cores, else three hours: LD_PRELOAD=libopenblas.so.0 python examples/make_tiny.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from matplotlib.figure import Figure
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm import generate, load
from mlx_lm.sample_utils import make_sampler
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spark25_mlx.config import ModelArgs
from spark25_mlx.model import Model

OUT = Path(__file__).parent / "tiny"
SEED = 25
SEQUENCE = 256  # four windows
BATCH = 4
STEPS = 2000
WARM_UP = 100
PEAK, FLOOR = 2.5e-3, 1e-4
TEXT_SHARE = 0.25  # rows of plain text; the rest are conversations
EVALUATE_EVERY = 100
HELD_OUT_EVERY = 12  # sections
CHUNK = 70  # tokens of an answer, to the end of its sentence

BOS, EOS, PAD = "<｜start▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
UNK = "<｜▁unk▁｜>"
FIRST_TOKENS = [BOS, EOS, PAD, "<think>", "</think>", UNK]
LAST_TOKENS = [
    *("<|System|>", "<|User|>", "<|Tool|>", "<|Developer|>", "<|Bot|>"),
    *("<tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "</tool_call>"),
]

CONFIG: dict[str, Any] = {
    "architectures": ["Spark2_5ForCausalLM"],
    "model_type": "spark2_5",
    "attention_bias": False,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "gate_attn_act_mode": "sigmoid",
    "head_dim": 64,
    "headwise_attn_output_gate": True,
    "hidden_act": "gelu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5000000.0, "rope_type": "default"},
        "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 64,
    "tie_word_embeddings": True,
    "vocab_size": 2048,
}

Message = dict[str, Any]

LOOK_UP = {
    "name": "look_up",
    "description": "Look up a help topic.",
    "parameters": {"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]},
}
QUESTIONS = [
    *("Explain {}", "Explain {}.", "What is {}?", "Tell me about {}."),
    *("Describe {}", "How does {} work?", "{}"),
]
GO_ON = ["Go on.", "Continue", "And then?", "Tell me more."]
GREETINGS = ["Hello", "Hi!", "Hello!", "Who are you?", "What are you?", "What can you do?", "Good morning"]
SELF = (
    "I am a tiny Spark model. I was trained on the help topics of Python. "
    "Ask me about a statement, a type or a method."
)
SAMPLES = ["Explain the for statement", "What is str.split?", "Tell me about sequence types.", "Who are you?"]


@dataclass
class Section:
    """A heading (or the signature of a method) and the prose below it, one string a paragraph."""

    subject: str
    paragraphs: list[str]


def unwrap(block: list[str]) -> str:
    """Join the lines of a paragraph that were broken at column 70."""
    out = block[0].strip()
    for before, line in pairwise(block):
        forced = len(before) + 1 + len(line.split()[0]) > 70
        hyphen = forced and re.search(r"[A-Za-z]-$", out)
        out += ("" if hyphen else " " if forced else "\n") + line.strip()
    return re.sub(" +", " ", out)


def is_prose(text: str) -> bool:
    """True for sentences; False for code, grammar, tables and bare lists."""
    words = re.findall(r"[A-Za-z]{2,}", text)
    letters = sum(c.isalpha() or c == " " for c in text)
    return (
        len(words) >= 5
        and letters > 0.8 * len(text)
        and "::=" not in text
        and ">>>" not in text
        and "\n" not in text
        and text[-1] in ".:)"
    )


def read_sections() -> list[Section]:
    """Every section of the help topics that has prose, by the topics' names; no paragraph comes twice."""
    sections = []
    seen: set[str] = set()
    for _, topic in sorted(topics.items()):
        current = Section("", [])
        lines = topic.rstrip().split("\n")
        i = 0
        while i < len(lines):
            if not lines[i].strip():
                i += 1
                continue
            underlined = i + 1 < len(lines) and re.fullmatch(r'([*=\-~^"])\1{2,}', lines[i + 1])
            entry = re.match(r"\s{0,3}(?:class |classmethod |static )*((?:\w+\.)*\w+)\(.*\)$", lines[i])
            if underlined or (entry and (i + 1 == len(lines) or not lines[i + 1].strip())):
                name = entry[1] if entry and not underlined else lines[i].strip().replace('"', "")
                current = Section(re.sub(r"^(The|An|A) ", lambda m: m[0].lower(), name), [])
                sections.append(current)
                i += 2 if underlined else 1
                continue
            block = []
            while i < len(lines) and lines[i].strip():
                block.append(lines[i])
                i += 1
            paragraph = unwrap(block)
            if is_prose(paragraph) and paragraph not in seen:
                seen.add(paragraph)
                current.paragraphs.append(paragraph)
    return [section for section in sections if section.paragraphs]


def make_tokenizer(texts: list[str], template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits are split one by one, the special tokens sit at both ends of the vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"] - len(LAST_TOKENS),
        special_tokens=FIRST_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for token in FIRST_TOKENS + LAST_TOKENS:
        # Tags are text that a client reads, role and sentence marks are not.
        mark = token in (BOS, EOS, PAD, UNK) or token.startswith("<|")
        tokenizer.add_tokens([AddedToken(token, special=mark, normalized=False)])
    if tokenizer.get_vocab_size() != CONFIG["vocab_size"]:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {CONFIG['vocab_size']}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=CONFIG["max_position_embeddings"],
    )


class Corpus:
    """Draws rows of tokens with the weights of their losses.

    Answers count (thought, text and EOS), questions do not; in plain text everything counts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sections: list[Section]) -> None:
        self.tokenizer = tokenizer
        self.sections = sections
        self.bot = tokenizer.convert_tokens_to_ids("<|Bot|>")
        self.chunks = [list(self._chunks(section)) for section in sections]
        # Long sections are drawn once for each chunk they begin with.
        self.starts = [(s, c) for s, chunks in enumerate(self.chunks) for c in range(max(1, len(chunks) - 1))]
        text = "".join(BOS + "\n\n".join(section.paragraphs) + EOS for section in sections)
        self.text = np.array(tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int32)

    def _chunks(self, section: Section) -> Iterator[str]:
        chunk = ""
        for paragraph in section.paragraphs:
            gap = "\n\n"
            for sentence in re.split(r"(?<=[.:]) (?=[A-Z])", paragraph):
                if chunk and len(self.tokenizer.tokenize(chunk)) >= CHUNK:
                    yield chunk
                    chunk = ""
                chunk += (gap if chunk else "") + sentence
                gap = " "
        yield chunk

    def _encode(self, messages: list[Message], silent: int = 0, **kwargs: Any) -> tuple[list[int], list[int]]:
        """Tokens and weights of a conversation whose first `silent` answers are context only."""
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        ids = self.tokenizer.encode(rendered, add_special_tokens=False)
        weights = [0] * len(ids)
        for turn, start in enumerate(i for i, token in enumerate(ids) if token == self.bot):
            if turn >= silent:
                stop = ids.index(CONFIG["eos_token_id"], start)
                # The token after <|Bot|> is part of the prompt.
                weights[start + 2 : stop + 1] = [1] * (stop - start - 1)
        return ids, weights

    def conversation(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """A greeting, a look-up by tool call, or a question about a section with its continuation."""
        thinks = rng.random() < 0.6

        def answer(content: str, thought: str, **more: Any) -> Message:
            reasoning = {"reasoning_content": thought} if thinks else {}
            return {"role": "assistant", "content": content, **reasoning, **more}

        kind = rng.random()
        if kind < 0.03:
            user = {"role": "user", "content": str(rng.choice(GREETINGS))}
            return self._encode([user, answer(SELF, "The question is about me.")])
        s, c = self.starts[rng.integers(len(self.starts))]
        subject, chunks = self.sections[s].subject, self.chunks[s]
        thought = f"The question is about {subject}."
        if kind < 0.11:
            call = {"name": "look_up", "arguments": {"topic": subject}}
            sentence = re.split(r"(?<=[.:]) (?=[A-Z])", self.sections[s].paragraphs[0])[0]
            messages: list[Message] = [
                {"role": "user", "content": f"Look up {subject}"},
                answer("", "I look it up.", tool_calls=[call]),
                {"role": "tool", "content": sentence},
                answer(sentence, thought),
            ]
            return self._encode(messages, tools=[LOOK_UP])
        messages = [
            {"role": "user", "content": str(rng.choice(QUESTIONS)).format(subject)},
            answer(chunks[c], thought),
        ]
        if c + 1 < len(chunks):
            messages += [
                {"role": "user", "content": str(rng.choice(GO_ON))},
                answer(chunks[c + 1], f"I go on about {subject}."),
            ]
        return self._encode(messages, silent=int(c > 0))

    def batch(self, rng: np.random.Generator) -> tuple[mx.array, mx.array]:
        """Tokens int32 [BATCH, SEQUENCE + 1] and weights fp32 [BATCH, SEQUENCE] of the predicted tokens."""
        tokens = np.zeros((BATCH, SEQUENCE + 1), np.int32)
        weights = np.ones((BATCH, SEQUENCE + 1), np.float32)
        for row in range(BATCH):
            if rng.random() < TEXT_SHARE:
                start = rng.integers(len(self.text) - SEQUENCE)
                tokens[row] = self.text[start : start + SEQUENCE + 1]
                continue
            ids: list[int] = []
            counts: list[int] = []
            while len(ids) <= SEQUENCE:
                more_ids, more_counts = self.conversation(rng)
                ids += more_ids
                counts += more_counts
            tokens[row], weights[row] = ids[: SEQUENCE + 1], counts[: SEQUENCE + 1]
        return mx.array(tokens), mx.array(weights[:, 1:])


def weighted_loss(model: Model, tokens: mx.array, weights: mx.array) -> mx.array:
    """Mean cross-entropy in nats over the tokens that count."""
    loss = nn.losses.cross_entropy(model(tokens[:, :-1]).astype(mx.float32), tokens[:, 1:])
    return (loss * weights).sum() / mx.maximum(weights.sum(), 1)


def text_loss(model: Model, text: np.ndarray) -> float:
    """Mean cross-entropy in nats over whole rows of plain text."""
    rows = text[: len(text) // (SEQUENCE + 1) * (SEQUENCE + 1)].reshape(-1, SEQUENCE + 1)
    losses = [weighted_loss(model, mx.array(row[None]), mx.ones((1, SEQUENCE))).item() for row in rows]
    return float(np.mean(losses))


@dataclass
class History:
    """Losses in nats a token, by step."""

    steps: int  # of the whole run
    train: list[float]
    held_out: list[tuple[int, float]]
    seconds: float = 0.0


def train(model: Model, corpus: Corpus, held_out: Corpus, steps: int, work: Path) -> History:
    """Train in fp32; saves to `work` at every evaluation and goes on from such a save."""
    warm_up = min(WARM_UP, steps // 10)
    schedule = optim.join_schedules(
        [optim.linear_schedule(0.0, PEAK, max(1, warm_up)), optim.cosine_decay(PEAK, steps - warm_up, FLOOR)],
        [warm_up],
    )
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.1, bias_correction=True)
    optimizer.init(model.trainable_parameters())
    history = History(steps, [], [])
    saved = work / "state.json"
    if saved.exists():
        history = History(**json.loads(saved.read_text()))
        if history.steps != steps:
            raise SystemExit(f"{work} holds a run of --steps {history.steps}: remove it or choose --work")
        model.load_weights(str(work / "model.safetensors"))
        moments: Any = mx.load(str(work / "optimizer.safetensors"))
        optimizer.state = tree_unflatten(moments)
        print(f"going on from step {len(history.train)} of {work}")
    loss_and_grad = nn.value_and_grad(model, weighted_loss)
    state = [model.state, optimizer.state]

    def update(tokens: mx.array, weights: mx.array) -> mx.array:
        loss, grads = loss_and_grad(model, tokens, weights)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        return loss

    compiled = mx.compile(update, inputs=state, outputs=state)
    began = time.perf_counter() - history.seconds
    for step in range(len(history.train) + 1, steps + 1):
        loss = compiled(*corpus.batch(np.random.default_rng([SEED, step])))
        mx.eval(loss, state)
        history.train.append(float(loss))
        if step % EVALUATE_EVERY == 0 or step == steps:
            history.held_out.append((step, text_loss(model, held_out.text)))
            history.seconds = time.perf_counter() - began
            recent = np.mean(history.train[-EVALUATE_EVERY:])
            rate = step * BATCH * SEQUENCE / history.seconds
            held = history.held_out[-1][1]
            print(f"step {step}: train {recent:.3f}, held out {held:.3f}, {rate:.0f} tokens/s", flush=True)
            mx.save_safetensors(str(work / "model.safetensors"), by_name(model.parameters()))
            mx.save_safetensors(str(work / "optimizer.safetensors"), by_name(optimizer.state))
            saved.write_text(json.dumps(vars(history)))
    return history


def by_name(tree: Any) -> dict[str, mx.array]:
    """The arrays of a tree under their dotted names."""
    return dict(tree_flatten(tree))


def plot(history: History, path: Path) -> None:
    """The training loss (mean of 50 steps) and the held-out loss."""
    width = min(50, len(history.train))
    smooth = np.convolve(history.train, np.ones(width) / width, "valid")
    figure = Figure(figsize=(6.4, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(len(smooth)) + width, smooth, label=f"training batches (mean of {width} steps)")
    axes.plot(*zip(*history.held_out, strict=True), "o-", markersize=3, label="held-out sections, plain text")
    axes.set(xlabel="step", ylabel="cross-entropy (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Software": None})


def to_bf16(model: Model) -> Model:
    """Round the weights to the type in which they are stored."""
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    return model


def write_checkpoint(model: Model, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Weights, configuration and tokenizer in the layout of the Hugging Face hub."""
    tensors = by_name(model.parameters())
    mx.save_safetensors(str(out / "model.safetensors"), tensors, {"format": "mlx"})
    generation = {
        **{key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **{"do_sample": True, "temperature": 0.7, "top_p": 0.95},
    }
    for name, content in (("config", CONFIG), ("generation_config", generation)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    # The name that every release of transformers knows.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def show(out: Path) -> Iterator[tuple[str, float, str]]:
    """Load the written folder as a user would and yield prompt, temperature and what it says."""
    model, tokenizer = load(str(out))[:2]
    for prompt in SAMPLES:
        for temperature in (0.0, 0.7):
            mx.random.seed(SEED)
            messages = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            sampler = make_sampler(temp=temperature)
            yield prompt, temperature, generate(model, tokenizer, ids, max_tokens=200, sampler=sampler)


README = """# A tiny Spark checkpoint

A model of the `spark2_5` family with {parameters:,} parameters ({size:.1f} MB in bf16) for demonstrations and
tests. It is trained, not random, so mistakes show as broken English and its greedy choices are clear-cut.
It knows nothing but fragments of Python's help topics; do not rely on what it says. At temperature 0 it
recites, at 0.7 its sentences often go astray. It mixes up related topics, and the argument of a tool call is
often another topic than the one asked for.

```
mlx_lm.generate --model examples/tiny --prompt "Explain the for statement"
```

| | |
|---|---|
| layers | 8: (3 sliding, 1 full) twice, window 64 |
| width | hidden 192, GeGLU 256, 4 query heads and 1 key/value head of dimension 64, sigmoid gate per head |
| rotary embedding | sliding: theta 10,000, all 64 dimensions; full: theta 5,000,000, the leading 16 |
| vocabulary | 2048, byte-level BPE; digits one by one; head tied to the embedding |
| context | configured for 8192; trained on rows of {sequence} tokens |

Special tokens have the family's spellings: ids 0 to 5 as published, the role and tool tokens at the end of
the vocabulary. Turns, thinking, the tools block and tool calls follow the family's format. The tokenizer puts
no BOS in front: the template writes one for every turn.

## How it was made

`python examples/make_tiny.py` wrote every file here but the chat template. The text is the prose of
`pydoc_data.topics` (Python {python}; code, grammar and tables left out): {trained} sections with {tokens:,}
tokens, and {held} sections held out. A quarter of the rows is plain text. The rest are conversations: a
question about a section, with or without a thought before the answer, and the continuation of the answer;
some look a section up by a tool call (`look_up`, on "Look up X" when that tool is offered); some are
greetings. In conversations only the answers count for the loss.

AdamW in fp32, {steps} steps of {batch} x {sequence} tokens, peak rate {peak}, cosine decay, seed {seed}:
{minutes:.0f} minutes at {rate:.0f} tokens/s ({machine}).

![losses by step](loss.png)

| loss, nats a token | |
|---|---|
| training batches, last {window} steps | {train:.3f} |
| held-out text, best (step {best_step}) | {best:.3f} |
| held-out text, at the end | {last:.3f} |
| held-out text, stored bf16 weights | {stored:.3f} |

The tokens drawn are {epochs:.0f} times those of the text, so the model learns it by heart; the held-out loss
shows what that is worth on sections that it has not seen. With another Python the text, and so the weights,
differ.

## What it says

The prompt ends in `<think>`, so the output starts with the thought.

{samples}## Licence of the text

The help topics are part of Python's documentation, © Python Software Foundation, under the PSF License
Version 2.
"""


def write_readme(out: Path, **figures: Any) -> None:
    samples = ""
    for prompt, temperature, text in show(out):
        samples += f"**{prompt}** (temperature {temperature:g})\n\n```\n{text.strip()}\n```\n\n"
    (out / "README.md").write_text(README.format(samples=samples, **figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    saves = Path(tempfile.gettempdir()) / "spark25_tiny"
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the checkpoint (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (%(default)s)")
    parser.add_argument("--work", type=Path, default=saves, help="folder of the saves (%(default)s)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    sections = read_sections()
    held_out = sections[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    trained = [section for i, section in enumerate(sections) if (i + 1) % HELD_OUT_EVERY]
    tool_text = [json.dumps(LOOK_UP), SELF] * 20
    tokenizer = make_tokenizer(
        [p for section in trained for p in (section.subject, *section.paragraphs)] + tool_text,
        (OUT / "chat_template.jinja").read_text(),
    )
    corpus, rest = Corpus(tokenizer, trained), Corpus(tokenizer, held_out)
    for name, part in (("training", corpus), ("held out", rest)):
        print(f"{name}: {len(part.sections)} sections, {len(part.text)} tokens")

    mx.random.seed(SEED)
    model = Model(ModelArgs.from_dict(CONFIG))
    history = train(model, corpus, rest, options.steps, options.work)
    model = to_bf16(model)
    options.out.mkdir(parents=True, exist_ok=True)
    write_checkpoint(model, tokenizer, options.out)
    plot(history, options.out / "loss.png")
    drawn = options.steps * BATCH * SEQUENCE
    best_step, best = min(history.held_out, key=lambda pair: pair[1])
    parameters = sum(weight.size for weight in by_name(model.parameters()).values())
    window = min(EVALUATE_EVERY, options.steps)
    blas = ", OpenBLAS preloaded" if "openblas" in os.environ.get("LD_PRELOAD", "") else ""
    write_readme(
        options.out,
        parameters=parameters,
        size=2 * parameters / 1e6,
        python=platform.python_version(),
        trained=len(trained),
        tokens=len(corpus.text),
        held=len(held_out),
        steps=options.steps,
        batch=BATCH,
        sequence=SEQUENCE,
        peak=PEAK,
        seed=SEED,
        minutes=history.seconds / 60,
        rate=drawn / history.seconds,
        machine=f"{os.cpu_count()} cores, mlx {version('mlx')} on {mx.default_device().type.name}{blas}",
        window=window,
        train=np.mean(history.train[-window:]),
        best_step=best_step,
        best=best,
        last=history.held_out[-1][1],
        stored=text_loss(model, rest.text),
        epochs=drawn / len(corpus.text),
    )
    # The next run starts anew.
    for save in ("state.json", "model.safetensors", "optimizer.safetensors"):
        (options.work / save).unlink()


if __name__ == "__main__":
    main()
