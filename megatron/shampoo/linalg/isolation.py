"""What to do when a library call on a batch raises: find out which of the matrices made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def isolated[T: tuple[Any, ...]](solve: Callable[..., T], failed: Callable[..., T], *batches: Tensor | None) -> T:
    """Solve a batch; where that raises, every matrix by itself, so that only those fail that make it fail.

    Args:
        solve: from batches to a named tuple of batches (or None).
        failed: what stands for one matrix, a batch of one, that cannot be solved; likewise.
        *batches: `(batch, ...)` each, or None. Single matrices are handed over as copies, since a failed solver may
            have overwritten its input.

    Returns:
        The result of `solve`, or those of the single matrices joined; an entry that is None for one is None for all.

    Raises:
        OutOfMemoryError: that is no matter of a matrix.
    """
    try:
        return solve(*batches)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # LinAlgError, and what cuSOLVER's own failures arrive as
        pass
    count = next(len(batch) for batch in batches if batch is not None)
    single = []
    for index in range(count):
        one = [None if batch is None else batch[index : index + 1].clone() for batch in batches]
        try:
            single.append(solve(*one))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            single.append(failed(*one))
    joined: Iterable[Any] = (
        None if any(part is None for part in parts) else torch.cat(parts) for parts in zip(*single, strict=True)
    )
    return type(single[0])(*joined)
