"""Module paths, source lines and names are the user's own."""

import contextlib

import pytest
import torch

import autop_ac
from autop_ac._torch_annotate import is_users_file
from autop_ac.capture.names import (
    block_instance,
    block_of_path,
    module_path,
    source_line,
    user_name,
)


def stack(*entries):
    """An ``nn_module_stack`` of ``(key, path)``, from outside in."""
    return {key: (path, object) for key, path in entries}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self']", ""),
        ("L['self'].layers.0.attention", "layers.0.attention"),
        ("L['self']._modules['layers'][0].mlp", "layers.0.mlp"),
        ("L['self']._export_root.layers.1.mlp", "layers.1.mlp"),
        ("L['self'].layers.0._checkpoint_wrapped_module.mlp", "layers.0.mlp"),
        (
            "L['self']._export_root.layers.0.__dict__['_modules']['_checkpoint_wrapped_module'].mlp",
            "layers.0.mlp",
        ),
        ("L['self'].layers.0.mlp._orig_mod.up", "layers.0.mlp.up"),
        ("L['self'].model.layers.0", "layers.0"),
    ],
)
def test_module_path_is_the_users_own(path, expected):
    assert module_path(stack(("1", "L['self']"), ("2", path)), prefix="model") == expected
    assert module_path(None) == module_path({}) == ""


def test_names_of_parameters():
    assert user_name("layers.0._checkpoint_wrapped_module.w") == "layers.0.w"
    assert user_name("_orig_mod.layers.0.w") == "layers.0.w"


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("", ""),
        ("embed", ""),
        ("layers.3.mlp.0", "layers.3"),
        ("0.layers.3", "0"),
        ("h.12", "h.12"),
    ],
)
def test_a_block_is_the_path_to_its_first_number(path, block):
    assert block_of_path(path) == block


def test_each_call_of_a_block_is_an_instance_of_its_own():
    layer, inside = "L['self'].model.layers.3", "L['self'].model.layers.3.mlp"
    first = stack(("1", "L['self']"), ("2", layer), ("3", inside))
    again = stack(("1", "L['self']"), ("2@1", layer), ("3@1", inside))
    assert block_instance(first, prefix="model") == "layers.3"
    assert block_instance(again, prefix="model") == "layers.3@1"
    # a child that is called without its layer
    assert block_instance(stack(("3@2", inside)), prefix="model") == "layers.3"
    assert block_instance(stack(("1", "L['self'].embed"))) == block_instance(None) == ""


@pytest.mark.parametrize(
    ("name", "users"),
    [
        ("/home/me/autop_ac/tutorials/train.py", True),
        ("/home/me/torch/model.py", True),
        ("/tmp/ipykernel_12/34.py", True),
        ("<ipython-input-1>", True),
        (torch.nn.functional.__file__, False),
        (autop_ac.annotate.__file__, False),
        (contextlib.__file__, False),
        ("<eval_with_key>.7", False),
        ("<frozen runpy>", False),
    ],
)
def test_a_users_file_is_told_by_where_it_is_and_not_by_its_name(name, users):
    assert is_users_file(name) is users
    assert source_line(f'File "{name}", line 3') == (f"{name}:3" if users else "")
