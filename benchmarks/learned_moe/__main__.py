"""Make, or look at, a small mixture-of-experts language model whose experts specialise by domain.

    python -m benchmarks.learned_moe show     what the committed model has learned, with a picture
    python -m benchmarks.learned_moe train    make it anew: minutes on two cores, no network

It has read English prose, Python code, sums and French.  Its folder is a plain Hugging Face one
(Qwen3-MoE, 1.9 M weights): `trireme serve --model benchmarks/learned_moe/model` serves it.
`train` takes French from two packages that nothing else needs, and says which are missing.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.learned_moe import checkpoint, picture
from benchmarks.learned_moe.french import MissingText
from benchmarks.learned_moe.make import make
from benchmarks.learned_moe.measure import measure
from benchmarks.learned_moe.training import Recipe

_REPORT = "report.txt"


def main() -> int:
    args = _parse()
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    if args.command == "train":
        try:
            make(args.folder, replace(Recipe(), steps=args.steps))
        except MissingText as error:
            print(error, file=sys.stderr)
            return 1
    report = "\n".join(picture.lines(measure(args.folder)))
    print(report)
    if args.command == "train":
        (args.folder / _REPORT).write_text(report + "\n", "utf-8")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learned_moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("show", "train"))
    parser.add_argument("--folder", type=Path, default=checkpoint.FOLDER, help="of the model")
    parser.add_argument("--threads", type=int, default=2, help="of torch (%(default)s)")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="of train (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
