"""A key-value cache whose rows come and go while a batch is being generated.

All rows end in the same column: row r with n tokens uses the columns `width - n .. width - 1`, whatever is
left of them is masked. So a prompt of any length can join a running batch, and positions, which are given
to the model, do not depend on the columns.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

_SPARE_TOKENS = 64
"""Columns that are added at a time, so that not every step copies the cache."""


class RowsLayer(DynamicLayer):
    """Keys and values of one layer, [rows, heads, columns, head size], with spare columns on the right."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.width = 0
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Notes what kind of states come; they are stored by `update`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the states of new columns; returns all columns, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        states = (key_states, value_states)
        start, end = self.width, self.width + key_states.shape[-2]
        if self._stored is None or self._stored[0].shape[-2] < end:
            self._stored = tuple(  # type: ignore[assignment]
                _widened(
                    state[..., :0, :] if self._stored is None else self._stored[i][..., :start, :],
                    left=0,
                    right=end - start + _SPARE_TOKENS,
                )
                for i, state in enumerate(states)
            )
        assert self._stored is not None
        for stored, state in zip(self._stored, states, strict=True):
            stored[..., start:end, :] = state
        self._show(end)
        return self.keys, self.values  # type: ignore[return-value]

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.width

    def select(self, rows: torch.Tensor, width: int) -> None:
        """Keeps some rows (a row may be named several times) and the last `width` columns."""
        assert self._stored is not None
        start = self.width - width
        self._stored = tuple(  # type: ignore[assignment]
            _widened(s[..., start : self.width, :].index_select(0, rows), 0, _SPARE_TOKENS)
            for s in self._stored
        )
        self._show(width)

    def append_rows(self, other: RowsLayer) -> None:
        """Adds the rows of another layer below; both end in the same column afterwards."""
        assert self._stored is not None and other._stored is not None
        width = max(self.width, other.width)
        self._stored = tuple(  # type: ignore[assignment]
            torch.cat(
                [
                    _widened(mine[..., : self.width, :], width - self.width, _SPARE_TOKENS),
                    _widened(theirs[..., : other.width, :], width - other.width, _SPARE_TOKENS),
                ]
            )
            for mine, theirs in zip(self._stored, other._stored, strict=True)
        )
        self._show(width)

    def _show(self, width: int) -> None:
        """Sets what the model sees: views of the columns in use."""
        assert self._stored is not None
        self.width = width
        self.keys, self.values = (s[..., :width, :] for s in self._stored)


class RowsCache(Cache):
    """One RowsLayer per layer of the model."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowsLayer)

    def select(self, rows: torch.Tensor, width: int) -> None:
        """Keeps some rows and the last `width` columns of every layer."""
        for layer in self.layers:
            layer.select(rows, width)  # type: ignore[attr-defined]

    def append_rows(self, other: RowsCache) -> None:
        """Adds the rows of another cache below."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append_rows(theirs)  # type: ignore[attr-defined]


def _widened(states: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """Adds columns of zeros; what a mask hides must still be finite."""
    return torch.nn.functional.pad(states, (0, 0, left, right))
