"""Classes of the user's own: what is found by a name, and what is said of those that cannot be had."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.errors import ModelError
from headway.models.custom import build_own, load_class
from headway.recipe import Model

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, depth=2, *, rate=0.5):
        super().__init__()
        table = torch.arange(width, dtype=torch.float32)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for layer in self.layers:
            layer.register_buffer("table", table, persistent=False)
        self.layers[0].weight = self.layers[-1].weight

class Open(Net):
    def __init__(self, **options):
        super().__init__(options.get("width", 3))

class Looks(Net):
    def __init__(self, width=3):
        super().__init__(width)
        self.first = self.layers[0].weight.mean().item()

class Hides(Net):
    def __init__(self, width=3):
        super().__init__(width)
        self.layers[1].extra = torch.zeros(2)

class Places(Net):
    def __init__(self, width=3):
        super().__init__(width)
        self.gain = nn.Parameter(torch.ones(width, device="cpu"))

class Fails(Net):
    def __init__(self, width=3):
        raise ValueError("no such width\\\\nsecond line")

def make(width):
    return Net(width)
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `shapes` with a module `nets`, and modules that cannot be imported."""
    folder = tmp_path / "shapes"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "nets.py").write_text(MODULE)
    (folder / "needs.py").write_text("import a_module_that_nobody_has\n")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "shapes"]:
        del sys.modules[name]


def test_a_class_is_found_and_called_with_its_arguments() -> None:
    net = build_own(Model(class_="shapes.nets:Net", args={"width": 5, "depth": 3}), "cpu")
    assert type(net) is load_class("shapes.nets:Net")
    assert len(net.layers) == 3
    assert net.layers[1].weight.shape == (5, 5)


def test_on_the_meta_device_nothing_has_memory_and_ties_stay() -> None:
    net = build_own(Model(class_="shapes.nets:Net", args={"width": 5}), "meta")
    assert {tensor.device.type for tensor in (*net.parameters(), *net.buffers())} == {"meta"}
    assert net.layers[0].weight is net.layers[1].weight
    assert [name for name, _ in net.named_parameters()] == ["layers.0.weight", "layers.0.bias", "layers.1.bias"]


def test_a_buffer_that_several_modules_share_has_all_its_names() -> None:
    net = build_own(Model(class_="shapes.nets:Net", args={"width": 5}), "cpu")
    assert [name for name, _ in net.named_buffers()] == ["layers.0.table", "layers.1.table"]
    assert all(torch.equal(buffer, torch.arange(5.0)) for buffer in net.buffers())


def test_options_by_keyword_take_any_name() -> None:
    assert isinstance(build_own(Model(class_="shapes.nets:Open", args={"width": 4, "other": 1}), "cpu"), nn.Module)


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("nowhere_at_all:Net", "no module nowhere_at_all", "or add its folder to PYTHONPATH"),
        ("shpaes.nets:Net", "no module shpaes", "did you mean shapes"),
        ("shapes.net:Net", "no module shapes.net", "shapes has nets"),
        ("shapes.needs:Net", "shapes.needs imports a_module_that_nobody_has", "install a_module_that_nobody_has"),
        ("shapes.broken:Net", "importing shapes.broken failed: SyntaxError", ""),
        ("shapes.leaves:Net", "importing shapes.leaves failed: SystemExit: 3", ""),
        ("shapes.nets:Nte", "shapes.nets has no Nte", "shapes.nets has Net"),
        ("shapes.nets:Qqqq", "shapes.nets has no Qqqq", "Fails, Hides, Looks, Net, Open, Places"),
        ("shapes.nets:make", "shapes.nets:make, which is not a model class", "torch.nn.Module"),
        ("shapes.nets:torch", "shapes.nets:torch, which is not a model class", "torch.nn.Module"),
    ],
)
def test_missing_class_is_reported_in_one_sentence(spec: str, message: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_class(spec)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "args", "device", "message", "hint"),
    [
        ("Net", {}, "cpu", "Net needs an argument width", "model.args.width="),
        ("Net", {"width": 3, "deph": 1}, "cpu", "Net takes no argument deph", "it takes depth"),
        ("Net", {"width": "wide"}, "cpu", "shapes.nets:Net cannot be built with model.args: TypeError", ""),
        ("Fails", {}, "cpu", "cannot be built with model.args: ValueError: no such width", ""),
        ("Looks", {}, "meta", "cannot be built on the meta device", ".item()"),
        (
            "Hides",
            {},
            "cpu",
            "Hides has a tensor layers.1.extra that is neither a parameter nor a buffer",
            "register_buffer",
        ),
    ],
)
def test_unbuildable_class_is_reported_in_one_sentence(
    name: str, args: dict[str, object], device: str, message: str, hint: str
) -> None:
    with pytest.raises(ModelError) as caught:
        build_own(Model(class_=f"shapes.nets:{name}", args=args), device)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert "\n" not in caught.value.message


def test_only_the_name_in_the_recipe_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "stray.py").write_text("from shapes.nets import Net\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path / "elsewhere"))])
    with pytest.raises(ModelError, match="no module stray"):
        load_class("stray:Net")
