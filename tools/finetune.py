"""Fine-tunes a language model from a Hugging Face folder: full parameters, loss on responses only."""

from __future__ import annotations

import argparse
import sys

import _environment  # noqa: F401  first: it finds the package and names what is missing

from megatron_wd.backend.launch import is_worker, run_worker
from megatron_wd.config import UserError, resolved_yaml
from megatron_wd.config.cli import run_main

EPILOG = """\
CONFIG is a YAML file, such as those in configs/finetune; key=value arguments change single values of it.
docs/finetune.md explains every key.

examples:
  python tools/finetune.py configs/finetune/arithmetic.yaml model=runs/quickstart/hf run_dir=runs/sums
  python tools/finetune.py configs/finetune/metamathqa.yaml model=runs/1b/hf run_dir=runs/1b_math seed=8107
  python tools/finetune.py configs/finetune/arithmetic.yaml --grid optim.lr=3e-4,1e-3 optim.weight_decay=0,0.1
  torchrun --nproc-per-node 4 tools/finetune.py configs/finetune/metamathqa.yaml train.fsdp=true

A run that was stopped goes on from its last checkpoint when the same command is given again.

exit codes: 0 done, 2 wrong use, config or data, 3 stopped by a signal after saving, 1 anything else
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values to change")
    parser.add_argument(
        "--grid",
        metavar="key=A,B",
        nargs="+",
        help="run every combination, each in a folder below run_dir; finished ones are skipped",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print what would run, and stop"
    )
    parser.add_argument("--dry-run", action="store_true", help="read model and data, and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron_wd.finetune.schema import load_finetune_config

    if arguments.grid:
        if arguments.print_config or arguments.dry_run:
            raise UserError("--grid runs a grid; leave out --print-config and --dry-run.")
        from megatron_wd.finetune.grid import run_grid

        return run_grid(arguments.config, arguments.overrides, arguments.grid)
    config = load_finetune_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(resolved_yaml(config, mark_changes=True), end="")
        return 0
    from megatron_wd.finetune.run import run

    return run(config, dry_run=arguments.dry_run)


if __name__ == "__main__":
    sys.exit(run_worker(lambda: main(None)) if is_worker() else run_main(main))
