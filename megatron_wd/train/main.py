"""From a configuration to an exit code: what each worker process does.

Imports stay inside: signals are taken first, so that a run which is stopped while it loads still ends well.
"""

from __future__ import annotations

import errno
import os
import sys

from megatron_wd.backend.signals import StopSignal
from megatron_wd.config import Config, UserError, validate_world


def run(config: Config) -> int:
    """Trains, or resumes, the run that a configuration describes.

    Args:
        config: validated.

    Returns:
        The exit code: 0 done, 1 stopped on a NaN, 3 stopped on a signal after saving.

    Raises:
        UserError: the configuration, the data or the machine do not allow it; before training, except
            for a disk that is full.
    """
    validate_world(config, int(os.environ.get("WORLD_SIZE", "1")))
    stop = StopSignal()
    from megatron_wd.backend.world import start_world, stop_world

    world = start_world(config.parallel)
    from megatron_wd.train.loop import train
    from megatron_wd.train.setup import set_up
    from megatron_wd.train.step import NonFiniteError

    state = None
    try:
        state = set_up(config, world)
        return 0 if train(state, stop) else 3
    except NonFiniteError as error:
        if world.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        raise UserError(
            f"run_dir {config.run_dir} cannot be written: {error.strerror}. Free space or repair the disk, "
            "then start the run again: it resumes from its newest checkpoint."
        ) from error
    finally:
        if state is not None and state.metrics is not None:
            state.metrics.close()
        stop.restore()
        stop_world()
