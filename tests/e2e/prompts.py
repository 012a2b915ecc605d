"""The prompts of the equality suite: lengths where an off-by-one would show, real text, chat."""

import random
from dataclasses import dataclass

from core.ports import Tokenizer

BLOCK = 16
BOUNDARIES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 95, 96, 97,
              127, 128, 129, 159, 160, 161, 255, 256, 257, 511, 512, 513, 1023, 2000]  # fmt: skip
TEXT = (
    "The trireme was a warship with three banks of oars. Its crew of two hundred rowed in time, "
    "and a single stroke out of step could foul the whole bank. def advance(table, state, event): "
    "return table[state, event]  # 3.14159 and 2,718 are numbers. Les rameurs chantaient; die "
    "Ruderer sangen; 漕ぎ手たちは歌った。 🚣‍♀️ Then the wind rose, and they shipped their oars. "
)
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence what a KV cache is.",
    "List three prime numbers larger than 100.",
    "Translate 'good morning' into Spanish, French and German.",
    "What is 17 * 23? Show your work.",
    "Give me a short Python function that reverses a string.",
    "Who wrote 'Pride and Prejudice'?",
    "Why is the sky blue?",
    "Suggest a name for a cat that likes to swim.",
    "What does HTTP stand for?",
    "Summarise the story of the tortoise and the hare.",
]


@dataclass(frozen=True)
class Prompt:
    name: str
    tokens: tuple[int, ...]


def all_prompts(tokenizer: Tokenizer) -> list[Prompt]:
    """At least 100, in a fixed order; about 15,000 tokens together."""
    source = random.Random(20)
    text = tokenizer.encode(TEXT * 40)
    found = [Prompt(f"text-{n}", tuple(text[:n])) for n in BOUNDARIES]
    for i, n in enumerate(BOUNDARIES[:30]):
        ids = tuple(source.randrange(100, tokenizer.vocab_size) for _ in range(n))
        found.append(Prompt(f"random-{n}-{i}", ids))
    shared = tuple(text[300:428])
    for i in range(16):
        cut = source.choice((16, 32, 63, 64, 65, 128))
        tail = tuple(tokenizer.encode(f" Number {i * 37}: {QUESTIONS[i % 12]}"))
        found.append(Prompt(f"shared-{cut}-{i}", shared[:cut] + tail))
    for i, question in enumerate(QUESTIONS):
        chat = tokenizer.render_chat([{"role": "user", "content": question}])
        found.append(Prompt(f"chat-{i}", tuple(tokenizer.encode(chat))))
    for i in range(8):
        turns = [
            {"role": "system", "content": f"You are oarsman number {i}."},
            {"role": "user", "content": QUESTIONS[i]},
            {"role": "assistant", "content": "Let me think about that."},
            {"role": "user", "content": QUESTIONS[-1 - i]},
        ]
        found.append(Prompt(f"turns-{i}", tuple(tokenizer.encode(tokenizer.render_chat(turns)))))
    return found
