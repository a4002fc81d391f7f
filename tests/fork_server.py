"""Server process that runs ``pretrain_gpt.py`` many times for the price of one import of torch and Megatron.

It imports the entry script and everything heavy that a run needs, starts no thread, and then forks the ranks of each
requested run. Requests and replies are JSON, one object a line, over stdin and stdout; `tests.launch` is the client.

A forked rank differs from one under torchrun in three ways that a test should know: all ranks share one string hash
seed, Megatron's modules are imported before the entry's ``main`` runs, and a process that multiprocessing spawns
imports this file instead of the entry, which is quicker.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.experiments.ports import free_port

HEAVY_MODULES = (
    "megatron.training.training",
    "megatron.training.checkpointing",
    "megatron.training.inprocess_restart",
    "megatron.training.models.gpt",
    "megatron.training.datasets.data_samplers",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.tokenizers.text",
    "megatron.core.tokenizers.utils.build_tokenizer",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
)
POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0
"""How long the other ranks may go on after one has failed, before they are killed."""


def load_entry(path: str) -> ModuleType:
    """Import the entry script as the module ``pretrain_gpt`` without running its ``main``.

    Args:
        path: the script's path.

    Returns:
        The module; it has a function ``main``.
    """
    spec = importlib.util.spec_from_file_location("pretrain_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain_gpt"] = module
    spec.loader.exec_module(module)
    return module


def preload() -> None:
    """Import what a run needs and build Megatron's parser once."""
    for name in HEAVY_MODULES:
        importlib.import_module(name)
    from megatron.training.arguments import add_megatron_arguments

    # Every parse reads the source of Megatron's dataclasses for its help texts: half a second a rank without a cache.
    inspect.getsource = functools.cache(inspect.getsource)  # type: ignore[assignment]
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def native_thread_count() -> int:
    """Number of operating-system threads of this process (1 where it cannot be told)."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 1


def call_setup(name: str) -> Any:
    """Call the function named ``package.module:function`` and return what it returns."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)()


def exit_code(error: SystemExit) -> int:
    """The exit status that the interpreter would give for ``error``, printing its message if it has one."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def run_rank(entry: ModuleType, request: dict[str, Any], rank: int, port: int) -> int:
    """Run the entry's ``main`` as rank ``rank`` in this forked process.

    Args:
        entry: the entry module.
        request: the run, as `tests.launch.Launcher.run` sends it.
        rank: global rank; all ranks are on this machine.
        port: rendezvous port.

    Returns:
        The exit status.
    """
    from tests.recorder import Recorder

    for name, value in request["env"].items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    world_size = str(request["world_size"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size,
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    os.chdir(request["cwd"])
    sys.argv = [str(entry.__file__), *request["args"]]
    recorder = Recorder(Path(request["directory"]), rank, request["record"])
    try:
        recorder.install()
        if request["setup"]:
            recorder.record["setup"] = call_setup(request["setup"])
        entry.main()
        recorder.finish()
        status = 0
    except SystemExit as error:
        status = exit_code(error)
    except BaseException:
        traceback.print_exc()
        status = 1
    recorder.write()
    return status


def fork_rank(entry: ModuleType, request: dict[str, Any], rank: int, port: int, reply_fd: int) -> int:
    """Fork one rank into its own process group.

    Args:
        entry: the entry module.
        request: the run.
        rank: global rank.
        port: rendezvous port.
        reply_fd: the server's reply pipe, closed in the child.

    Returns:
        The child's process id, in the parent only.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        os.close(reply_fd)
        log = os.open(Path(request["directory"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        status = run_rank(entry, request, rank, port)
        # os._exit skips atexit; multiprocessing's own exit function ends the checkpoint writer's Manager.
        from multiprocessing import util

        util._exit_function()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def has_ended(pid: int) -> bool:
    """Whether the child has ended; it stays a zombie, so that its process group's number is not given away."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap(pid: int) -> int:
    """Kill what a rank has started and left behind, and collect its exit status.

    Args:
        pid: the rank's process, running or ended; it leads its process group.

    Returns:
        The exit status; minus the signal's number when a signal ended it.
    """
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def client_is_gone() -> bool:
    """Whether the client has closed its end of the request pipe."""
    poller = select.poll()
    poller.register(0, select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def wait_for_ranks(pids: list[int], timeout: float) -> tuple[list[int], int | None, bool]:
    """Wait until every rank has ended; kill the rest at the timeout, or a while after one has failed.

    Args:
        pids: process ids by rank.
        timeout: seconds.

    Returns:
        Exit statuses by rank, the rank that failed first, and whether time ran out.
    """
    deadline = time.monotonic() + timeout
    statuses: dict[int, int] = {}
    first_failed: int | None = None
    timed_out = False
    while len(statuses) < len(pids):
        overdue = time.monotonic() >= deadline or client_is_gone()
        timed_out = timed_out or (overdue and first_failed is None)
        for rank, pid in enumerate(pids):
            if rank in statuses or not (overdue or has_ended(pid)):
                continue
            statuses[rank] = reap(pid)
            if statuses[rank] != 0 and first_failed is None and not timed_out:
                first_failed = rank
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)
    return [statuses[rank] for rank in range(len(pids))], first_failed, timed_out


def run(entry: ModuleType, request: dict[str, Any], reply_fd: int) -> dict[str, Any]:
    """Fork the ranks of one run and wait for them.

    Args:
        entry: the entry module.
        request: the run.
        reply_fd: the server's reply pipe.

    Returns:
        The reply: returncodes, first_failed, timed_out, wall_seconds.
    """
    start, port, pids = time.monotonic(), free_port(), []
    for rank in range(request["world_size"]):
        pid = fork_rank(entry, request, rank, port, reply_fd)
        with contextlib.suppress(PermissionError):  # the child was quicker to do it
            os.setpgid(pid, pid)
        pids.append(pid)
    returncodes, first_failed, timed_out = wait_for_ranks(pids, request["timeout"])
    return {
        "returncodes": returncodes,
        "first_failed": first_failed,
        "timed_out": timed_out,
        "wall_seconds": time.monotonic() - start,
    }


def main() -> None:
    """Import, say so, then serve one request a line until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entry", help="path of pretrain_gpt.py")
    path = parser.parse_args().entry
    reply_fd = os.dup(1)
    os.dup2(2, 1)  # replies alone go to the client; what an import prints must not mix with them
    with os.fdopen(reply_fd, "w", buffering=1) as replies:
        entry = load_entry(path)
        preload()
        if native_thread_count() > 1:
            raise RuntimeError(f"{native_thread_count()} threads after the imports: a fork would lose all but one")
        gc.collect()
        gc.freeze()
        replies.write(json.dumps({"ready": True}) + "\n")
        while line := sys.stdin.readline():
            replies.write(json.dumps(run(entry, json.loads(line), reply_fd)) + "\n")


if __name__ == "__main__":
    main()
