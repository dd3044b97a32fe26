"""Puts the observer around what a training step calls in torch. Nothing here changes a value."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from threading import get_ident

import torch
import torch.utils.data
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

from .spans import BACKWARD, DATA_WAIT, FORWARD, HOST_SYNC, OPTIMIZER
from .user_code import find_user_frame, is_user_file

SYNCHRONISING = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__format__", "__repr__")


def wrap_optimizers(observer):
    """A step ends with the update of the first optimizer that is seen; those of others belong to the step."""
    spans = observer.spans
    first = []

    def begin(optimizer, args, kwargs):
        if not first and os.getpid() == observer.pid:
            observer.thread = get_ident()
        if get_ident() == observer.thread:
            spans.drop_unfinished(OPTIMIZER)
            spans.enter(OPTIMIZER)

    def end(optimizer, args, kwargs):
        if get_ident() != observer.thread:
            return
        spans.leave()
        if not first:
            first.append(optimizer)
        if optimizer is first[0]:
            observer.end_step()

    torch_optimizer.register_optimizer_step_pre_hook(begin)
    torch_optimizer.register_optimizer_step_post_hook(end)


def wrap_loader(observer):
    """Time between asking for a batch and having it; making a new iterator marks the edge of an epoch."""
    spans = observer.spans
    next_batch, begin_epoch = dataloader._BaseDataLoaderIter.__next__, torch.utils.data.DataLoader.__iter__
    ends = []  # the reference to the newest iterator, which has to live for its callback
    lefts = weakref.WeakKeyDictionary()  # iterator → batches that it still has

    @functools.wraps(next_batch)
    def timed_next(iterator):
        if get_ident() != observer.thread:
            return next_batch(iterator)
        left = lefts.get(iterator)
        if left is not None:
            left = lefts[iterator] = left - 1
        observer.begin_batch(left)
        spans.enter(DATA_WAIT)
        try:
            return next_batch(iterator)
        except StopIteration:
            observer.end_epoch()
            raise
        finally:
            observer.note_wait(spans.leave())

    @functools.wraps(begin_epoch)
    def marked_iter(loader):
        if get_ident() != observer.thread:
            return begin_epoch(loader)
        observer.end_epoch()
        spans.enter(DATA_WAIT)
        try:
            iterator = begin_epoch(loader)
        finally:
            spans.leave()
        # A loop that is left by break drops its iterator.
        ends.append(weakref.ref(iterator, lambda _: observer.end_epoch()))
        del ends[:-1]
        with contextlib.suppress(TypeError):  # of a stream, which has no length
            lefts[iterator] = len(loader)
        return iterator

    dataloader._BaseDataLoaderIter.__next__ = timed_next
    torch.utils.data.DataLoader.__iter__ = marked_iter


def wrap_backward(observer):
    torch.autograd.backward = _time_calls(observer, torch.autograd.backward, BACKWARD)


def _time_calls(observer, function, kind):
    spans = observer.spans

    @functools.wraps(function)
    def timed(*args, **kwargs):
        if get_ident() != observer.thread:
            return function(*args, **kwargs)
        spans.enter(kind)
        try:
            return function(*args, **kwargs)
        finally:
            spans.leave()

    return timed


def wrap_synchronising(observer):
    """Tensor methods that make the host wait for the device, where user code calls them outside of the loader."""
    for name in SYNCHRONISING:
        setattr(torch.Tensor, name, _time_synchronising(observer, name, getattr(torch.Tensor, name)))


def _time_synchronising(observer, name, method):
    spans, sites = observer.spans, observer.syncs

    @functools.wraps(method)
    def timed(tensor, *args, **kwargs):
        if get_ident() != observer.thread or spans.is_inside(DATA_WAIT):
            return method(tensor, *args, **kwargs)
        frame = sys._getframe(1)
        if not is_user_file(frame.f_code.co_filename):
            frame = find_user_frame(1) if name in ("__format__", "__repr__") else None
        if frame is None or spans.is_inside(HOST_SYNC):
            return method(tensor, *args, **kwargs)
        spans.enter(HOST_SYNC)
        try:
            return method(tensor, *args, **kwargs)
        finally:
            sites.find(frame, name, tensor.device.type).add(spans.leave(), observer.step)

    return timed


class ModuleSearch:
    """Finds the classes of the modules that a script calls itself, in the course of one step.

    Their ``__call__`` is timed from then on. Hooks on the modules would travel into pickles and copies of them.
    """

    def __init__(self, observer):
        self._observer, self._depth, self._classes = observer, 0, {}
        self._call = torch.nn.Module.__call__

    def begin(self):
        def noted(module, *args, **kwargs):
            if get_ident() != self._observer.thread:
                return self._call(module, *args, **kwargs)
            if not self._depth:
                self._classes[type(module)] = type(module).__call__
            self._depth += 1
            try:
                return self._call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        torch.nn.Module.__call__ = noted

    def end(self):
        noted, torch.nn.Module.__call__ = torch.nn.Module.__call__, self._call
        for kind, call in self._classes.items():
            kind.__call__ = _time_calls(self._observer, self._call if call is noted else call, FORWARD)
