"""Wrap what a training step calls in torch, so that the observer times it. No value changes."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from threading import get_ident

import torch
import torch.utils.data
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import IterableDataset, dataloader

from . import samples
from .spans import BACKWARD, DATA_WAIT, FORWARD, HOST_SYNC, OPTIMIZER
from .user_code import find_user_frame, is_user_file

SYNCHRONISING = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__format__", "__repr__")
OTHERS_AT_MOST = 50  # updates of other optimizers without one of the first: its part of the training is over


def wrap_optimizers(observer):
    """Observe optimizers: a step ends with each update of the first one, or of one that has taken its place."""
    spans = observer.spans
    running = []  # ids, as to keep an optimizer is to keep its model
    first, n_others = None, 0  # weak reference; updates of others since its last

    def is_gone():
        return first is None or first() is None

    def unwind(optimizer):
        """End the update of ``optimizer``, and nested updates that an exception left open."""
        while id(optimizer) in running:
            running.pop()
            spans.leave()

    def begin(optimizer, args, kwargs):
        if is_gone() and observer.thread is not None:
            observer.thread = get_ident()
        if get_ident() == observer.thread:
            unwind(optimizer)
            running.append(id(optimizer))
            spans.enter(OPTIMIZER)

    def end(optimizer, args, kwargs):
        nonlocal first, n_others
        if get_ident() != observer.thread or id(optimizer) not in running:
            return
        unwind(optimizer)
        is_new = is_gone() or (n_others == OTHERS_AT_MOST and optimizer is not first())
        if is_new:
            first = weakref.ref(optimizer)
        if optimizer is first():
            n_others = 0
            observer.end_step(is_edge=is_new)
        else:
            n_others += 1

    torch_optimizer.register_optimizer_step_pre_hook(begin)
    torch_optimizer.register_optimizer_step_post_hook(end)


def wrap_loader(observer):
    """Time how long each batch is waited for; a new iterator marks the start of an epoch."""
    spans = observer.spans
    next_batch, begin_epoch = dataloader._BaseDataLoaderIter.__next__, torch.utils.data.DataLoader.__iter__
    ends = []  # weak reference to the newest iterator; it must live for its callback
    lefts = weakref.WeakKeyDictionary()  # iterator → batches left

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
        if not observer.step:  # the last loader before the first step is the training's
            samples.trace_again(observer)
        spans.enter(DATA_WAIT)
        try:
            iterator = begin_epoch(loader)
        finally:
            spans.leave()
        # A loop that is left by break drops its iterator.
        ends.append(weakref.ref(iterator, lambda _: observer.end_epoch()))
        del ends[:-1]
        if not isinstance(loader.dataset, IterableDataset):  # asking its length would make torch warn later
            with contextlib.suppress(Exception):  # any error of the user's dataset
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
    """Time the tensor methods that make the host wait for the device, when user code calls them."""
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
            sites.find(frame, name, tensor.device.type).add(spans.leave())

    return timed


def wrap_modules(observer):
    """Time the script's own calls of modules; calls of nested modules count as part of them."""
    spans, call = observer.spans, torch.nn.Module.__call__
    is_compiling = getattr(torch.compiler, "is_compiling", bool)  # bool() is False: torch 2.1 and 2.2 cannot tell
    is_left_out = False

    @functools.wraps(call)
    def timed(module, *args, **kwargs):
        nonlocal is_left_out
        if is_compiling() or observer.is_in_module or get_ident() != observer.thread:
            return call(module, *args, **kwargs)
        if not is_left_out:
            is_left_out = _leave_out_of_graphs(timed)
        observer.is_in_module = True
        spans.enter(FORWARD)
        try:
            return call(module, *args, **kwargs)
        finally:
            spans.leave()
            observer.is_in_module = False

    torch.nn.Module.__call__ = timed


def _leave_out_of_graphs(function):
    """Let Dynamo, once it is there, begin at what ``function`` calls: modules would share its recompile limit."""
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        skip(function.__code__)
    return skip is not None
