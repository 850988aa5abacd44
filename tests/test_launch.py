"""Starting a run: which Python, how many processes, and which exit code and message come out."""

import ast
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from megatron_wd.backend import launch
from megatron_wd.config import ParallelConfig, UserError

ROOT = Path(__file__).resolve().parent.parent
PRETRAIN = ROOT / "launch" / "pretrain.sh"
TINY = "configs/tiny.yaml"
TERMINATED = -signal.SIGTERM

# A rank that says when it is up, waits for SIGTERM, and then does as its argument says.
WORKER = """
import os, signal, sys, time
from megatron_wd.backend import launch
from megatron_wd.config import UserError

def work():
    what, rank = sys.argv[1], os.environ["RANK"]
    if what == "mistake":
        raise UserError("a mistake that every rank meets")
    if what == "crash" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    print(f"ready {rank}", flush=True)
    deadline = time.monotonic() + 60
    while not stopped and time.monotonic() < deadline:
        time.sleep(0.02)
    return 3 if what == "save" else 1

if __name__ == "__main__":
    sys.exit(launch.run_worker(work))
"""


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without what would choose a layout or a Python."""
    ours = ("RANK", "WORLD_SIZE", "NPROC_PER_NODE", "PYTHON", "CUDA_VISIBLE_DEVICES")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("PET_", "TORCHELASTIC", "MEGATRON_WD"))
    }
    return {**kept, **extra}


def bash(*arguments: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *arguments],
        cwd=cwd,
        env=clean_environment(**extra),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def workers(tmp_path: Path) -> Path:
    """A folder with worker.py, and in site/ what an installed megatron_wd would leave there."""
    (tmp_path / "worker.py").write_text(WORKER)
    installed = tmp_path / "site" / "megatron_wd-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron_wd\nVersion: 0\n")
    plugin = "megatron_wd = megatron_wd.backend.launch:torchrun_plugin"
    (installed / "entry_points.txt").write_text(f"[torchrun.handlers]\n{plugin}\n")
    return tmp_path


def start(folder: Path, what: str) -> tuple[int, Path]:
    """Launches the worker twice, from a fork: that spares each test the import of torch.

    Returns:
        Process id of the launcher, and the file that its output goes to.
    """
    import torch.distributed.run  # noqa: F401

    output = folder / "output.txt"
    output.touch()
    child = os.fork()
    if child:
        return child, output
    code = 99
    try:
        os.environ.clear()
        os.environ.update(clean_environment(PYTHONPATH=str(ROOT), TMPDIR=str(folder)))
        os.chdir(folder)
        stream = os.open(output, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(stream, descriptor)
        sys.stdout = sys.stderr = os.fdopen(stream, "w", buffering=1)
        code = launch.launch("worker.py", [what], 2)
    finally:
        os._exit(code)


def stop_when_ready(process: int, output: Path) -> None:
    """Sends SIGTERM as soon as both ranks are up."""
    deadline = time.monotonic() + 90
    while not all(f"ready {rank}" in output.read_text() for rank in (0, 1)):
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    os.kill(process, signal.SIGTERM)


def exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


# Exit codes


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([3, 3], 3),
        ([3, TERMINATED], 3),
        ([2, TERMINATED], 2),
        ([2, 3], 2),
        ([1, 3], 1),
        ([3, None], 1),
        ([3, -signal.SIGKILL], 1),
        ([TERMINATED, TERMINATED], 1),
        ([0, TERMINATED], 1),
        ([], 1),
    ],
)
def test_codes_of_workers_mean_one_code(codes: list[int | None], expected: int) -> None:
    assert launch.combined_code(codes) == expected


@pytest.mark.distributed
@pytest.mark.parametrize(("what", "code"), [("save", 3), ("fail", 1)])
def test_sigterm_to_the_launcher(workers: Path, what: str, code: int) -> None:
    process, output = start(workers, what)
    stop_when_ready(process, output)
    assert exit_code(process) == code
    lines = output.read_text().splitlines()
    assert sorted(lines) == ["ready 0", "ready 1"]  # nothing from torchrun


@pytest.mark.distributed
def test_a_mistake_is_said_once(workers: Path) -> None:
    process, output = start(workers, "mistake")
    assert exit_code(process) == 2
    assert output.read_text() == "error: a mistake that every rank meets\n"


@pytest.mark.distributed
def test_a_killed_rank_is_named(workers: Path) -> None:
    process, output = start(workers, "crash")
    assert exit_code(process) == 1
    assert "rank 1 was ended by SIGKILL" in output.read_text()


@pytest.mark.distributed
def test_sigterm_to_a_plain_torchrun(workers: Path) -> None:
    output = workers / "output.txt"
    path = os.pathsep.join([str(ROOT), str(workers / "site")])
    with output.open("wb") as stream:
        torchrun = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=2",
                "worker.py",
                "save",
            ],
            cwd=workers,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=clean_environment(PYTHONPATH=path, TMPDIR=str(workers)),
        )
    stop_when_ready(torchrun.pid, output)
    assert torchrun.wait(60) == 3
    assert "Traceback" not in output.read_text()
    assert not list(workers.glob("megatron_wd_*")), "the folder of codes is left behind"


def test_the_installed_package_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    if "entry-points" not in project:
        pytest.skip("pyproject.toml has no entry points: a plain torchrun ends with 1 on SIGTERM")
    target = project["entry-points"]["torchrun.handlers"]["megatron_wd"]
    assert target == "megatron_wd.backend.launch:torchrun_plugin"


# How many processes


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without GPUs; a test may write `nvidia-smi` into the folder."""
    for name in ("NPROC_PER_NODE", "PET_NPROC_PER_NODE", "PET_NNODES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def add_gpus(folder: Path, listing: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 9\necho '{listing}'\n")
    program.chmod(0o755)


def test_without_gpus_one_copy_of_the_model_is_started(machine: Path) -> None:
    assert launch.count_processes(ParallelConfig()) == 1
    assert launch.count_processes(ParallelConfig(tensor=2, pipeline=3, context=2)) == 12


def test_with_gpus_each_gets_a_process(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(machine, "GPU 0: X (UUID: a)\nGPU 1: X (UUID: b)\nGPU 2: X (UUID: c)")
    assert launch.count_processes(ParallelConfig(tensor=2)) == 3
    for visible, count in (("0,2", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("0,1,2,3,4", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert launch.count_gpus() == count, visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    add_gpus(
        machine, "GPU 0: X (UUID: a)\n  MIG 1g Device 0: (UUID: b)\n  MIG 1g Device 1: (UUID: c)"
    )
    assert launch.count_gpus() == 1


def test_the_user_decides(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "5")
    assert launch.count_processes(ParallelConfig(tensor=2)) == 5
    for wrong in ("0", "two", "-1", "1.5", ""):
        monkeypatch.setenv("NPROC_PER_NODE", wrong)
        with pytest.raises(UserError, match="NPROC_PER_NODE"):
            launch.count_processes(ParallelConfig())
    monkeypatch.setenv("PET_NNODES", "4")
    assert launch.count_nodes() == 4


def test_threads_are_shared_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for processes, threads in ((1, "8"), (2, "4"), (3, "2"), (16, "1")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        launch.limit_threads(processes)
        assert os.environ["OMP_NUM_THREADS"] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    launch.limit_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == "6"


# launch/pretrain.sh


@pytest.mark.parametrize("script", ["pretrain.sh", "slurm.sh"])
def test_launchers_parse(script: str) -> None:
    path = ROOT / "launch" / script
    result = bash("-n", str(path))
    assert (result.returncode, result.stderr) == (0, "")
    assert os.access(path, os.X_OK)


def test_help_teaches() -> None:
    result = bash(str(PRETRAIN), "--help", PYTHON=sys.executable)
    assert result.returncode == 0
    for part in ("torchrun --nproc-per-node", "key=value", "--dry-run", "exit codes"):
        assert part in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((TINY, "optim.lrr=1"), "unknown key; did you mean optim.lr?"),
        ((TINY, "--nproc-per-node", "2"), "--nproc-per-node"),
        ((), "no CONFIG is given"),
        (("configs/none.yaml",), "configs/none.yaml: there is no such config file"),
        ((TINY, "train.global_batch_samples=9", "parallel.tensor=2"), None),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments: tuple[str, ...], expected: str | None) -> None:
    processes = "1" if expected else "3"
    result = bash(str(PRETRAIN), *arguments, PYTHON=sys.executable, NPROC_PER_NODE=processes)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert (expected or "3 processes cannot hold the layout") in result.stderr
    assert result.stdout == ""


def test_print_config_works_from_any_folder(tmp_path: Path) -> None:
    config = str(ROOT / TINY)
    result = bash(
        str(PRETRAIN),
        config,
        "optim.eps=1e-7",
        "--print-config",
        cwd=tmp_path,
        PYTHON=sys.executable,
    )
    assert result.returncode == 0, result.stderr
    assert "eps: 1.0e-07  # default: 1e-08" in result.stdout


def test_a_worker_under_torchrun_reads_the_same_file() -> None:
    # What torchrun does with it: Python, unbuffered, with a rank in the environment.
    command = [sys.executable, "-u", str(PRETRAIN), TINY]
    answers = []
    for rank in "01":
        environment = clean_environment(RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        answers.append(
            subprocess.run(
                [*command, "--print-config"], cwd=ROOT, env=environment, capture_output=True
            )
        )
    assert [answer.returncode for answer in answers] == [0, 0]
    assert answers[0].stdout.startswith(b"run_dir: runs/tiny") and answers[1].stdout == b""


def bare_python(folder: Path) -> Path:
    """A Python that finds none of our packages, as on a fresh machine."""
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.skipif((ROOT / ".venv" / "bin" / "python").exists(), reason=".venv has the packages")
def test_without_the_environment_the_launcher_names_the_command(tmp_path: Path) -> None:
    python = bare_python(tmp_path)
    result = bash(str(PRETRAIN), TINY, PYTHON=str(python), PATH=f"{tmp_path}:/bin:/usr/bin")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "`make setup`" in result.stderr and f"pretrain.sh {TINY}`" in result.stderr


@pytest.mark.parametrize("tool", sorted(p.name for p in (ROOT / "tools").glob("[!_]*.py")))
def test_without_the_environment_each_tool_names_the_command(tool: str, tmp_path: Path) -> None:
    python = bare_python(tmp_path)
    command = [str(python), str(ROOT / "tools" / tool), "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "run `make setup`, then `.venv/bin/python tools/" in result.stderr
    assert "has no torch" in result.stderr


def test_an_old_python_gets_the_same_message(tmp_path: Path) -> None:
    source = (ROOT / "tools" / "_environment.py").read_text("utf-8")
    ast.parse(source, feature_version=(3, 8))
    code = (
        "import sys; sys.version_info = (3, 9, 1); sys.path.insert(0, 'tools')\n"
        "sys.argv = ['tools/convert.py']; import _environment"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "is Python 3.9, not 3.12 or later" in result.stderr


# launch/slurm.sh

STAND_INS = {
    # Two machines, one after the other; a step takes a while where the test wants to stop it.
    "srun": """
while [ "${1#-}" != "$1" ]; do echo "$1" >> srun_options; shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" || status=$?; done
exit ${status:-0}""",
    "scontrol": """
echo "$@" >> scontrol_calls
case $1 in
    show) [ "$2" = hostnames ] && printf 'alpha\\nbeta\\n' || echo "JobState=$STATE" ;;
esac""",
    "scancel": 'echo "$@" >> scancel_calls',
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Slurm's commands as stand-ins, and a repository whose launcher tells what it was given."""
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh{text if text.startswith(chr(10)) else chr(10) + text}\n")
        program.chmod(0o755)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "pretrain.sh").write_text(
        'echo "$PET_NNODES $PET_RDZV_ENDPOINT $PET_RDZV_ID $PET_RDZV_CONF: $*" >> told\n'
        "touch started; sleep ${SECONDS_TO_RUN:-0}; exit $CODE\n"
    )
    return tmp_path


def slurm_environment(cluster: Path, **extra: str) -> dict[str, str]:
    job = {
        "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12345",
        "SLURM_SUBMIT_DIR": str(cluster),
        "SLURM_JOB_NODELIST": "alpha,beta",
        "SLURM_JOB_NUM_NODES": "2",
        "CODE": "0",
        "STATE": "RUNNING",
    }
    return clean_environment(**{**job, **extra})


def run_slurm(cluster: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "launch" / "slurm.sh"), *arguments]
    environment = slurm_environment(cluster, **extra)
    return subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, timeout=60
    )


def test_slurm_starts_one_launcher_on_each_machine(cluster: Path) -> None:
    result = run_slurm(cluster, "c.yaml", "run_dir=a b", SLURM_RESTART_COUNT="2")
    assert result.returncode == 0, result.stderr
    assert (cluster / "told").read_text().splitlines() == [
        "2 alpha:22345 12345-2 is_host=true: c.yaml run_dir=a b",
        "2 alpha:22345 12345-2 is_host=false: c.yaml run_dir=a b",
    ]
    assert "--output=runs/slurm/12345/node%n.log" in (cluster / "srun_options").read_text()
    assert "requeue" not in (cluster / "scontrol_calls").read_text()


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [("3", "RUNNING", True), ("3", "CANCELLED", False), ("1", "RUNNING", False)],
)
def test_slurm_requeues_a_run_that_was_saved(
    cluster: Path, code: str, state: str, requeued: bool
) -> None:
    result = run_slurm(cluster, "c.yaml", CODE=code, STATE=state)
    assert result.returncode == int(code)
    assert ("requeue 12345" in (cluster / "scontrol_calls").read_text()) is requeued


def test_slurm_passes_sigterm_to_the_launchers_and_waits(cluster: Path) -> None:
    command = ["bash", str(ROOT / "launch" / "slurm.sh"), "c.yaml"]
    environment = slurm_environment(cluster, CODE="3", SECONDS_TO_RUN="1")
    process = subprocess.Popen(command, cwd="/", env=environment, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (cluster / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 3
    assert (cluster / "scancel_calls").read_text() == "--signal=TERM 12345\n"
    assert len((cluster / "told").read_text().splitlines()) == 2
    assert "requeue 12345" in (cluster / "scontrol_calls").read_text()


def test_slurm_refuses_what_cannot_work(cluster: Path) -> None:
    assert "no config" in run_slurm(cluster).stderr
    outside = run_slurm(cluster, "c.yaml", SLURM_JOB_ID="")
    assert (outside.returncode, "sbatch" in outside.stderr) == (2, True)
    elsewhere = run_slurm(cluster, "c.yaml", REPOSITORY="/")
    assert (elsewhere.returncode, "REPOSITORY" in elsewhere.stderr) == (2, True)
