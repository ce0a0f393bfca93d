"""Where modules compute, and their weights for code that reads them without calling the module.

A model may be spread over devices, or offloaded by accelerate: then its weights are on `meta`, except while one of its
modules is being called.
"""

import contextlib

import torch


def execution_device(module) -> torch.device:
    """The device on which a module with a `weight` computes."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return module.weight.device


@contextlib.contextmanager
def weights_in_place(module):
    """Within this context the weights of an offloaded module are where it computes, as while it is being called."""
    if not (module.weight.is_meta and hasattr(module, "_hf_hook")):
        yield
        return
    module._hf_hook.pre_forward(module)
    try:
        yield
    finally:
        module._hf_hook.post_forward(module, None)
