"""The hooks of a member of the reducer: the reducer's own, and users', which wait for the mean."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from torch import Tensor

from pydist.errors import NotSupported

Hook: TypeAlias = "Callable[[Any], Any]"
OWN = -1
"""The key of the reducer's hook; torch counts users' hooks from 0."""


class HookedLeaf(Protocol):
    """The interface of the leaf whose hooks these are; see `pydist.gradients.leaf.Leaf`."""

    has_hooks: bool
    waits: bool
    is_partitioned: bool

    def refuse_hooks(self) -> None:
        """Raises if users have registered hooks."""


_Owner = TypeVar("_Owner", bound=HookedLeaf)


class Hooks(OrderedDict[int, Hook], Generic[_Owner]):
    """Hooks of one kind that a parameter has: the reducer's first, then those of users.

    It replaces torch's dict, so that users' hooks can wait for the mean. Handles of hooks that were
    registered before still refer to the earlier dict, which is kept.
    """

    def __init__(self, leaf: _Owner, earlier: OrderedDict[int, Hook] | None) -> None:
        super().__init__()
        self.leaf = leaf
        super().__setitem__(OWN, _nothing)  # first, as the engine calls them in this order
        for key, hook in (earlier or {}).items():
            if key != OWN:
                leaf.has_hooks = True
                registered = hook.hook if isinstance(hook, _DeferredHook) else hook
                super().__setitem__(key, _DeferredHook(self, registered, earlier, key))

    def set_own(self, hook: Callable[[_Owner, Any], Any]) -> None:
        """Sets the reducer's hook, which keeps neither these hooks nor the parameter alive."""
        me = weakref.ref(self)

        def call(value: Any) -> Any:
            hooks = me()
            return None if hooks is None else hook(hooks.leaf, value)

        super().__setitem__(OWN, call)

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, _DeferredHook(self, hook))
        self.leaf.has_hooks = True
        if self.leaf.is_partitioned:
            try:
                self.leaf.refuse_hooks()
            except NotSupported:
                del self[key]
                raise

    def users(self) -> list[Hook]:
        """Returns users' hooks that were not removed, in the order of registration."""
        return [h.hook for h in self.values() if isinstance(h, _DeferredHook) and h.registered]


class _DeferredHook:
    """Wrapper of a user's hook, which runs when the engine calls it, or later with the mean."""

    def __init__(
        self,
        hooks: Hooks[Any],
        hook: Hook,
        earlier: OrderedDict[int, Hook] | None = None,
        key: int = 0,
    ) -> None:
        self._hooks, self.hook = weakref.ref(hooks), hook
        self._earlier, self._key = earlier, key

    @property
    def registered(self) -> bool:
        """Whether the hook was not removed."""
        earlier = self._earlier
        if earlier is None:
            return True
        entry = earlier.get(self._key)
        return entry is not None and getattr(entry, "registered", True)

    def __call__(self, value: Any) -> Any:
        hooks = self._hooks()
        waits = hooks is not None and hooks.leaf.waits
        return None if waits or not self.registered else self.hook(value)


def _nothing(_: Any) -> None:
    """Reserves the first place for the reducer's hook."""


def remove_own(
    tensor: Tensor, before: OrderedDict[int, Hook] | None, after: OrderedDict[int, Hook] | None
) -> None:
    """Sets only the users' hooks among these on a tensor that the reducer does not know."""
    set_hooks(tensor, _users_of(before), _users_of(after))


def _users_of(hooks: OrderedDict[int, Hook] | None) -> OrderedDict[int, Hook] | None:
    if not isinstance(hooks, Hooks):
        return hooks
    # Not None without users' hooks: torch would continue to call the earlier ones.
    return OrderedDict(enumerate(hooks.users()))


def set_hooks(
    tensor: Any, before: OrderedDict[int, Hook] | None, after: OrderedDict[int, Hook] | None
) -> None:
    """Sets the dicts of a tensor's hooks, of its gradient and of the accumulated one."""
    tensor._backward_hooks = before
    tensor._post_accumulate_grad_hooks = after
