"""Measure the cost of the sandbox for chat templates: CPU time against transformers' own.

Both render the same template over the same conversation in one run, by turns, and the least time of
each counts. Ours also marks the control tokens that the template itself wrote. The ratio is to
``apply_chat_template(tokenize=False)``; the goal is at most 1.3.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from scripts.benchmarks.results.report import machine, table

TEMPLATES = Path(__file__).resolve().parents[2] / "tests/orchestrator/text/chat/templates"
FAMILIES = ("chatml", "qwen3", "qwen3.5", "gemma3", "glm4.5", "phi3", "olmo3", "minimax-m2")
SIZES = (1, 20, 1001, 2000)
CONTENTS = {"plain": "123456789", "code": "if a < b | c[0]: <i>x</i>"}
MOST = 1.3
LIMIT_S = 60.0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench templates", description=__doc__)
    parser.add_argument(
        "--templates",
        nargs="+",
        default=FAMILIES,
        metavar="NAME",
        help=f"model families (default: {' '.join(FAMILIES)})",
    )
    parser.add_argument(
        "--messages",
        type=int,
        nargs="+",
        default=SIZES,
        metavar="N",
        help="messages of a conversation",
    )
    parser.add_argument("--rounds", type=int, default=7, help="renderings of each (default 7)")
    parser.add_argument("--quick", action="store_true", help="one template, to see that it works")
    return parser.parse_args(arguments)


def by_turns(rounds: int, *renders: Callable[[], object]) -> list[float]:
    """Return the least CPU seconds of each."""
    least = [float("inf")] * len(renders)
    for _ in range(rounds):
        for index, render in enumerate(renders):
            started = time.thread_time()
            render()
            least[index] = min(least[index], time.thread_time() - started)
    return least


def tokenizer() -> Tokenizer:
    """Return a tokenizer with the control tokens of many models."""
    made = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    words = ("im_start", "im_end", "end", "user", "assistant", "system", "eot_id")
    made.add_special_tokens(["<s>", "</s>", "[INST]", "[/INST]", *(f"<|{w}|>" for w in words)])
    return made


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    # It takes seconds to import, which --help need not wait for.
    from mlx_dp.orchestrator.text.chat.chat_prompts import ChatPrompts
    from mlx_dp.orchestrator.text.chat.chat_template import ChatTemplate
    from mlx_dp.orchestrator.text.text_model import Chat
    from tests.support.text.template_oracle import SPECIAL, Oracle

    oracle, rows, worst = Oracle(), [], 0.0
    names, sizes = options.templates, options.messages
    if options.quick:
        names, sizes = names[:1], sizes[:2]
    for name in names:
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        prompts = ChatPrompts(
            ChatTemplate(source, SPECIAL), source, tokenizer(), end_ids=(), unknown=None
        )
        for count, content in product(sizes, CONTENTS):
            messages = [
                {"role": ("user", "assistant")[index % 2], "content": CONTENTS[content]}
                for index in range(count)
            ]

            ours = partial(prompts.render, Chat(messages=messages), limit_s=LIMIT_S)
            theirs = partial(oracle.apply, source, messages, prompt=True)
            rounds = options.rounds * (20 if count < 100 else 1)
            our_s, their_s = by_turns(rounds, ours, theirs)
            worst = max(worst, our_s / their_s)
            shown = [f"{our_s * 1e3:.3f}", f"{their_s * 1e3:.3f}", f"{our_s / their_s:.2f}"]
            rows.append([name, content, str(count), *shown])
    print(machine())
    print(table(["template", "content", "messages", "ours, ms", "transformers, ms", "ratio"], rows))
    print(f"the largest ratio is {worst:.2f}, and at most {MOST} is wanted")
    return 0 if worst <= MOST else 1
