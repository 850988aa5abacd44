#!/usr/bin/env bash
# Trains the model that a config describes; `bash launch/pretrain.sh --help` says more.
#
# bash and Python both read this file: to bash the next lines find a Python and start it on this file, to
# Python they are a string. So `bash launch/pretrain.sh` works, and `torchrun launch/pretrain.sh` too.
""":"
here=${BASH_SOURCE[0]%/*}
[[ -d $here ]] || here=.
root=$(cd -- "$here/.." && pwd)
check=$root/tools/_environment.py
for python in "$root/.venv/bin/python" "${PYTHON:-}" python3 python; do
    if [[ -n $python ]] && "$python" "$check" >/dev/null 2>&1; then
        exec "$python" "$root/launch/pretrain.sh" "$@"
    fi
done
# None will do: the best of them says what it lacks.
for python in "$root/.venv/bin/python" "${PYTHON:-}" python3 python; do
    if [[ -n $python ]] && command -v "$python" >/dev/null && "$python" -c "" 2>/dev/null; then
        exec "$python" "$check" bash "$0" "$@"
    fi
done
echo "error: no Python found: install Python 3.12 or later, then run 'make setup'" >&2
exit 2
: <<'# end of the part that bash skips'
"""

# The writers of a checkpoint import this file again: everything slow is imported inside functions.
import os
import sys

EXAMPLES = """\
CONFIG is a YAML file; key=value arguments change single values of it, as in optim.lr=3e-4.
docs/configuration.md explains every key.

examples:
  bash launch/pretrain.sh configs/quickstart.yaml
  bash launch/pretrain.sh configs/quickstart.yaml optim.weight_decay=0.5 run_dir=runs/wd0.5
  bash launch/pretrain.sh configs/quickstart.yaml --print-config     what would run, and nothing else
  bash launch/pretrain.sh configs/quickstart.yaml --dry-run          are data, layout, memory all right?
  bash launch/pretrain.sh configs/plasticity/llama2_4b_20x_4096_ranks.yaml --dry-run --ranks 4096
  NPROC_PER_NODE=4 bash launch/pretrain.sh configs/quickstart.yaml   as many processes
  torchrun --nproc-per-node 4 launch/pretrain.sh configs/quickstart.yaml
  sbatch launch/slurm.sh configs/plasticity/llama2_1b_20x.yaml       several machines

Without NPROC_PER_NODE there is one process for each GPU; without a GPU, as many as one copy of the model
needs (parallel.tensor x parallel.pipeline x parallel.context).

--dry-run is one process on any machine: it pretends the ranks, builds each pipeline stage of the model
without memory behind it, and prints what a start prints, and parameters and memory of one rank per stage.
Tokenizer and data are checked where they exist.

A run that was stopped goes on where its last checkpoint was saved when the same command is given again.
SIGTERM or Ctrl-C: it saves first.

exit codes: 0 done, 2 wrong use or config, 3 stopped by a signal after saving, 1 anything else
"""

ONE_ANSWERS = {"-h", "--help", "--print-config", "--dry-run"}  # under torchrun, for all processes


def parse(argv):
    import argparse

    from megatron_wd.config import UserError

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(f"{message}; see launch/pretrain.sh --help")

    parser = Parser(
        prog="launch/pretrain.sh",
        description="Pretrain a language model, or resume its run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file, see configs/")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values over those of CONFIG")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every value, with the default where it differs, and stop",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config, data and layout on pretended ranks, print summary and memory, and stop",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="with --dry-run: pretend N processes (default: as many as one copy of the model needs)",
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print the numbers as JSON")
    options = parser.parse_intermixed_args(argv)
    if options.config is None:
        parser.error("no CONFIG is given, such as configs/quickstart.yaml")
    if not options.dry_run and (options.ranks is not None or options.json):
        parser.error("--ranks and --json need --dry-run")
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks is {options.ranks}; it must be at least 1")
    return options


def main(argv=None):
    """Starts the workers; as one of them, trains."""
    from megatron_wd.backend import launch

    argv = sys.argv[1:] if argv is None else argv
    if not launch.is_worker():
        return start(argv)
    if os.environ.get("RANK", "0") != "0" and ONE_ANSWERS & set(argv):
        return launch.run_worker(lambda: 0)  # one process answers for all
    launch.limit_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return launch.run_worker(lambda: work(argv))


def start(argv):
    """What the first process does: check everything that needs no torch, and start the workers."""
    from megatron_wd.backend import launch
    from megatron_wd.config import load_config, validate_world

    options = parse(argv)
    config = load_config(options.config, options.overrides)
    if options.print_config or options.dry_run:
        return work(argv)
    processes = launch.count_processes(config.parallel)
    world = processes * launch.count_nodes()
    validate_world(config, world)
    if launch.count_gpus() == 0:
        launch.limit_threads(processes)
    if world == 1:
        return work(argv)
    print(f"starting {processes} processes", flush=True)
    return launch.launch(os.path.abspath(__file__), argv, processes)


def work(argv):
    """What every worker does."""
    from megatron_wd.backend import launch
    from megatron_wd.config import load_config, resolved_yaml

    options = parse(argv)
    config = load_config(options.config, options.overrides)
    if options.print_config:
        print(resolved_yaml(config, mark_changes=True), end="")
        return 0
    if options.dry_run:
        from megatron_wd.train import dry_run

        started = os.environ.get("WORLD_SIZE") if launch.is_worker() else None
        return dry_run.run(
            config, options.ranks or (int(started) if started else None), as_json=options.json
        )
    from megatron_wd.train.main import run

    return run(config)


if __name__ == "__main__":
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
    import _environment  # noqa: F401  names what is missing, and finds the package

    from megatron_wd.config.cli import run_main

    sys.exit(run_main(main))
# end of the part that bash skips
