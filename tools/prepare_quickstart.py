"""Makes the quickstart's data: the running Python's standard library, tokenized, and a tokenizer
for it.

prepare_quickstart.py OUT    writes OUT/{tokenizer.model, train.bin, train.idx, valid.bin,
valid.idx, ...}

Nothing is downloaded. Run again, it ends at once if everything is there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import _environment  # noqa: F401  first: it finds the package and names what is missing

from megatron_wd.config.cli import run_main


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", help="folder to write, for example data/quickstart")
    parser.add_argument("--workers", type=int, help="number of processes (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    # Both libraries start threads of their own; one process per core is parallel enough.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from megatron_wd.data.quickstart import prepare_quickstart

    out = sys.stderr if args.json else sys.stdout
    result = prepare_quickstart(
        args.out, workers=args.workers, say=lambda line: print(line, file=out, flush=True)
    )
    if args.json:
        print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
