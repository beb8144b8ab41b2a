"""How mlx-lm finds the model: enabling, the import hook, registration, and seams that changed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_lm.models
import mlx_lm.utils
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import spark25_mlx
from spark25_mlx import _hook, plugin
from spark25_mlx.cache import FullKVCache, SlidingKVCache
from spark25_mlx.config import ModelArgs
from spark25_mlx.model import Model

NATIVE, ALIAS = _hook.MODULE_NAMES
OURS = (Model, ModelArgs)
ROOT = Path(spark25_mlx.__file__).parents[1]


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Each test starts and ends with nothing enabled, and with mlx-lm's own module not imported."""

    def reset() -> None:
        plugin.disable()
        plugin._warned.clear()
        for name in _hook.MODULE_NAMES:
            sys.modules.pop(name, None)
            vars(mlx_lm.models).pop(name.rpartition(".")[2], None)

    reset()
    yield
    reset()


def lookup(model_type: str = "spark2_5") -> tuple[type, type]:
    """What mlx-lm loads for a model type."""
    config = {"model_type": model_type, "architectures": ["Spark2_5ForCausalLM"]}
    return mlx_lm.utils._get_classes(config)


def python(code: str, cwd: Path, *flags: str, **environment: str) -> str:
    """What code prints in a fresh interpreter whose environment has no variable of ours but those given."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK25_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.strip()


# --- enable and disable ---


def test_nothing_is_substituted_until_enabled() -> None:
    assert lookup()[0].__module__ == NATIVE


def test_enable_before_mlx_lm_imported_its_module() -> None:
    assert plugin.enable()
    assert lookup() == OURS
    plugin.disable()
    assert NATIVE not in sys.modules
    assert not hasattr(mlx_lm.models, "spark2_5")
    assert lookup()[0].__module__ == NATIVE


def test_enable_after_mlx_lm_imported_its_module() -> None:
    native = importlib.import_module(NATIVE)
    assert plugin.enable()
    assert lookup() == OURS
    assert mlx_lm.models.spark2_5.Model is Model
    plugin.disable()
    assert sys.modules[NATIVE] is native
    assert mlx_lm.models.spark2_5 is native
    assert lookup() == (native.Model, native.ModelArgs)


def test_enabling_and_disabling_twice_is_the_same_as_once() -> None:
    native = importlib.import_module(NATIVE)
    finders = list(sys.meta_path)
    assert plugin.enable()
    substitute = sys.modules[NATIVE]
    assert plugin.enable()
    assert sys.modules[NATIVE] is substitute
    assert len(sys.meta_path) == len(finders) + 1
    plugin.disable()
    plugin.disable()
    assert sys.meta_path == finders
    assert sys.modules[NATIVE] is native
    assert plugin.enable()
    assert lookup() == OURS


def test_the_second_model_type() -> None:
    with pytest.raises(ValueError, match="sparkx2_5"):
        lookup("sparkx2_5")
    plugin.enable()
    assert lookup("sparkx2_5") == OURS
    plugin.disable()
    assert ALIAS not in sys.modules
    with pytest.raises(ValueError, match="sparkx2_5"):
        lookup("sparkx2_5")


def test_other_model_types_are_left_alone() -> None:
    plugin.enable()
    assert lookup("llama")[0].__module__ == "mlx_lm.models.llama"
    assert _hook.Finder().find_spec("mlx_lm.models.spark2_5_moe") is None


def test_an_explicit_enable_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK25_DISABLE", "1")
    assert plugin.enable()
    assert lookup() == OURS


# --- the finder, as a registered environment has it ---


def test_the_finder_alone_is_enough() -> None:
    _hook.install()
    assert lookup() == OURS
    plugin.disable()
    assert lookup()[0].__module__ == NATIVE


def test_enable_and_disable_with_the_finder_in_place() -> None:
    _hook.install()
    assert lookup() == OURS
    assert plugin.enable()
    assert sum(isinstance(finder, _hook.Finder) for finder in sys.meta_path) == 1
    plugin.disable()
    assert lookup()[0].__module__ == NATIVE


@pytest.mark.parametrize(("value", "ours"), [("1", False), ("yes", False), ("0", True), ("", True)])
def test_the_variable_switches_the_finder_off(
    value: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK25_DISABLE", value)
    _hook.at_start()
    assert _hook.installed() is ours
    _hook.install()
    assert (lookup() == OURS) is ours


# --- mlx-lm's own module ---


def test_native_module_is_the_imported_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, plugin._NATIVE_ALIAS, raising=False)
    native = importlib.import_module(NATIVE)
    assert plugin.native_module() is native
    plugin.enable()
    assert plugin.native_module() is native


def test_native_module_while_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, plugin._NATIVE_ALIAS, raising=False)
    plugin.enable()
    native = plugin.native_module()
    try:
        assert native.Model is not Model
        assert native.__file__ == str(Path(mlx_lm.models.__path__[0]) / "spark2_5.py")
        assert lookup() == OURS
        plugin.disable()
        assert plugin.native_module() is native
    finally:
        del sys.modules[plugin._NATIVE_ALIAS]


def test_mlx_lm_without_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, plugin._NATIVE_ALIAS, raising=False)
    monkeypatch.setattr(plugin.PathFinder, "find_spec", lambda *_: None)
    with pytest.raises(ModuleNotFoundError, match=NATIVE):
        plugin.native_module()
    monkeypatch.setattr(plugin, "SEAMS", {"mlx_lm.utils": ("no_such_name",)})
    with pytest.warns(plugin.SeamWarning, match="mlx-lm has none of its own"):
        plugin.enable()


# --- seams ---


def one_warning(caught: list[warnings.WarningMessage]) -> str:
    messages = [str(w.message) for w in caught if issubclass(w.category, plugin.SeamWarning)]
    assert len(messages) == 1
    return messages[0]


def break_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mlx_lm_cache, "load_prompt_cache")


def break_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm.models.cache", None)


def break_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mlx_lm.utils._get_classes
    table = {"_spark25_probe": "llama"}
    monkeypatch.setattr(
        mlx_lm.utils,
        "_get_classes",
        lambda config: plain({"model_type": table.get(config["model_type"], config["model_type"])}),
    )


def break_lookup_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mlx_lm.utils._get_classes
    monkeypatch.setattr(mlx_lm.utils, "_get_classes", lambda *, config: plain(config))


def break_our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spark25_mlx.model", None)


def break_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_lm_cache, "trim_prompt_cache", lambda cache, n: 0)


def break_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mlx_lm_cache.LRUPromptCache, "insert_cache")


def break_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte counts kept elsewhere: only trying the store can tell."""

    def init(self: Any, max_size: int = 10, max_bytes: int = 1 << 63) -> None:
        plain(self, max_size, max_bytes)
        self._bytes = self.__dict__.pop("_n_bytes")

    plain = mlx_lm_cache.LRUPromptCache.__init__
    monkeypatch.setattr(mlx_lm_cache.LRUPromptCache, "__init__", init)


def break_store_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_lm_cache.LRUPromptCache, "trim_to", lambda self, **_: None)


Change = Callable[[pytest.MonkeyPatch], None]
SEAMS: list[tuple[Change, str]] = [
    (break_name, "mlx_lm.models.cache.load_prompt_cache does not exist"),
    (break_module, "mlx_lm.models.cache cannot be imported"),
    (break_lookup, "mlx_lm.utils._get_classes does not import"),
    (break_lookup_signature, "mlx_lm.utils._get_classes does not import"),
    (break_our_model, "spark25_mlx.model cannot be imported"),
    (break_signature, "mlx_lm.models.cache.trim_prompt_cache has no parameter num_tokens"),
    (break_stand_in, "mlx_lm.models.cache.LRUPromptCache.insert_cache does not exist"),
    (break_store, "mlx_lm.models.cache.LRUPromptCache does not store caches as it did"),
    (break_store_limits, "mlx_lm.models.cache.LRUPromptCache does not store caches as it did"),
]


@pytest.mark.parametrize(("change", "named"), SEAMS)
def test_enable_with_a_changed_seam(change: Change, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native = importlib.import_module(NATIVE)
    before = list(sys.meta_path)
    change(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not plugin.enable()
        assert not plugin.enable()
    message = one_warning(caught)
    assert named in message
    assert mlx_lm.__version__ in message
    assert "mlx-lm's own model stays in use" in message
    assert sys.modules[NATIVE] is native
    assert sys.meta_path == before
    monkeypatch.undo()
    assert wired() == []


@pytest.mark.parametrize(("change", "named"), [seam for seam in SEAMS if seam[0] is not break_module])
def test_the_finder_with_a_changed_seam(change: Change, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    _hook.install()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        native = importlib.import_module(NATIVE)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(ALIAS)
    assert named in one_warning(caught)
    assert native.__file__ == str(Path(mlx_lm.models.__path__[0]) / "spark2_5.py")


@pytest.mark.parametrize(
    ("target", "message"),
    [("llama", r"finds mlx_lm\.models\.llama for spark2_5"), ("no_such_module", "fails for spark2_5")],
)
def test_mlx_lm_that_maps_the_type_elsewhere(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = importlib.import_module(NATIVE)
    monkeypatch.setitem(mlx_lm.utils.MODEL_REMAPPING, "spark2_5", target)
    with pytest.warns(plugin.SeamWarning, match=message):
        assert not plugin.enable()
    assert sys.modules[NATIVE] is native
    assert not _hook.installed()


def test_the_seam_check_leaves_no_trace() -> None:
    assert plugin.changed_seam() is None
    assert [name for name in sys.modules if "probe" in name and name.startswith("mlx_lm")] == []


# --- stand-ins ---

# Where mlx-lm has the functions that get stand-ins, by name and by import.
FUNCTIONS = {
    "mlx_lm.models.cache": ("trim_prompt_cache", "save_prompt_cache", "load_prompt_cache"),
    "mlx_lm.generate": ("trim_prompt_cache", "load_prompt_cache", "speculative_generate_step"),
    "mlx_lm.cache_prompt": ("save_prompt_cache",),
    "mlx_lm.utils": ("load_model",),
}
METHODS = ("fetch_nearest_cache", "insert_cache")
CACHES = ("FullKVCache", "SlidingKVCache", "QuantizedFullKVCache")


def wired() -> list[str]:
    """The names, of those that can have one, that have a stand-in or a class of ours now."""
    places = [(sys.modules[module], name) for module, names in FUNCTIONS.items() for name in names]
    places += [(mlx_lm_cache.LRUPromptCache, name) for name in METHODS]
    found = [name for place, name in places if hasattr(vars(place)[name], "__wrapped__")]
    return found + [name for name in CACHES if hasattr(mlx_lm_cache, name)]


ALL = [name for names in FUNCTIONS.values() for name in names] + [*METHODS, *CACHES]


@pytest.fixture(autouse=True)
def all_modules_loaded() -> None:
    for name in FUNCTIONS:
        importlib.import_module(name)


def test_enable_wires_and_disable_reverts() -> None:
    assert wired() == []
    before = {name: vars(sys.modules["mlx_lm.generate"])[name] for name in FUNCTIONS["mlx_lm.generate"]}
    for _ in range(2):
        plugin.enable()
        assert wired() == ALL
    for _ in range(2):
        plugin.disable()
        assert wired() == []
    assert {name: vars(sys.modules["mlx_lm.generate"])[name] for name in before} == before


def test_the_finder_wires_when_the_model_is_looked_up() -> None:
    _hook.install()
    assert lookup("llama") and wired() == []
    lookup()
    assert wired() == ALL
    plugin.disable()
    assert wired() == []


def test_names_imported_before_and_while_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of mlx-lm that is loaded late, and the program itself."""
    plain = mlx_lm_cache.trim_prompt_cache
    early, late = ModuleType("mlx_lm._early"), ModuleType("mlx_lm._late")
    other = ModuleType("other_package")
    main = sys.modules["__main__"]
    for module in (early, late, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for module in (early, other, main):
        monkeypatch.setattr(module, "trim_prompt_cache", plain, raising=False)
    plugin.enable()
    late.trim_prompt_cache = mlx_lm_cache.trim_prompt_cache  # type: ignore[attr-defined]
    ours = vars(late)["trim_prompt_cache"]
    assert ours is not plain
    assert vars(early)["trim_prompt_cache"] is vars(main)["trim_prompt_cache"] is ours
    assert vars(other)["trim_prompt_cache"] is plain
    plugin.disable()
    for module in (early, late, other, main):
        assert vars(module)["trim_prompt_cache"] is plain


def test_a_function_of_that_name_from_elsewhere_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model() -> None:
        raise NotImplementedError

    monkeypatch.setattr(importlib.import_module("mlx_lm.lora"), "load_model", load_model, raising=False)
    plugin.enable()
    assert vars(sys.modules["mlx_lm.lora"])["load_model"] is load_model


def test_caches_of_other_models_reach_the_originals() -> None:
    plugin.enable()
    caches = [mlx_lm_cache.KVCache(), mlx_lm_cache.RotatingKVCache(4)]
    for cache in caches:
        cache.update_and_fetch(*[mlx_lm_cache.mx.zeros((1, 1, 6, 2))] * 2)
    assert mlx_lm_cache.trim_prompt_cache(caches, 2) == 0
    assert mlx_lm_cache.trim_prompt_cache(caches[:1], 2) == 2
    assert [cache.offset for cache in caches] == [4, 6]


def test_trimming_is_all_or_nothing() -> None:
    plugin.enable()
    caches = [FullKVCache(), SlidingKVCache(8, slack=4)]
    for cache in caches:
        cache.append(*[mlx_lm_cache.mx.zeros((1, 1, 30, 2))] * 2)
    with pytest.raises(ValueError, match=r"layer 1: cannot trim 9 tokens.*nothing has been trimmed"):
        mlx_lm_cache.trim_prompt_cache(caches, 9)
    assert [cache.offset for cache in caches] == [30, 30]
    assert mlx_lm_cache.trim_prompt_cache(caches, 4) == 4
    assert [cache.offset for cache in caches] == [26, 26]


# --- registration ---


def test_register_writes_one_line_and_unregister_removes_it(tmp_path: Path) -> None:
    file = plugin.register(tmp_path)
    assert [*tmp_path.iterdir()] == [file]
    line = file.read_text()
    assert line.startswith("import ") and line.count("\n") == 1
    assert plugin.register(tmp_path) == file
    assert file.read_text() == line
    assert plugin.unregister(tmp_path) == file
    assert not [*tmp_path.iterdir()]
    assert plugin.unregister(tmp_path) is None


def test_registering_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(plugin.RegistrationError, match=r"cannot write .*absent.*virtual environment"):
        plugin.register(tmp_path / "absent")


def test_unregistering_what_cannot_be_removed(tmp_path: Path) -> None:
    plugin.pth_file(tmp_path).mkdir()
    with pytest.raises(plugin.RegistrationError, match="cannot remove"):
        plugin.unregister(tmp_path)


def start_up(site_packages: Path, then: str) -> str:
    """Code that reads a site-packages folder as a starting interpreter does, and goes on with `then`."""
    return (
        f"import os, site, sys; before = set(sys.modules); site.addsitedir({str(site_packages)!r}); "
        f"new = set(sys.modules) - before; {then}"
    )


@pytest.fixture
def registered(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    plugin.register(folder)
    return folder


def test_the_hook_imports_nothing_but_itself(registered: Path, tmp_path: Path) -> None:
    # What reading any .pth file imports is the interpreter's own doing.
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "plain.pth").write_text("import sys\n")
    code = f"import site; site.addsitedir({str(plain)!r}); " + start_up(registered, "print(*sorted(new))")
    assert python(code, tmp_path, "-S", PYTHONPATH=str(ROOT)) == "spark25_mlx spark25_mlx._hook"


def test_the_hook_of_an_uninstalled_package_is_silent(registered: Path, tmp_path: Path) -> None:
    code = start_up(registered, "print(*sys.meta_path, sep='\\n'); print('spark25_mlx' in new)")
    assert "Finder object" not in (printed := python(code, tmp_path, "-S"))
    assert printed.endswith("False")


def test_the_variable_keeps_the_hook_out(registered: Path, tmp_path: Path) -> None:
    code = start_up(registered, "from spark25_mlx import _hook; print(_hook.installed())")
    assert python(code, tmp_path, "-S", PYTHONPATH=str(ROOT)) == "True"
    assert python(code, tmp_path, "-S", PYTHONPATH=str(ROOT), SPARK25_DISABLE="1") == "False"


# --- the package itself ---


def test_importing_the_package_imports_no_other_module(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import spark25_mlx; "
        "print(*sorted(set(sys.modules) - before), spark25_mlx.__version__)"
    )
    assert python(code, tmp_path, "-S", PYTHONPATH=str(ROOT)).split() == [
        "spark25_mlx",
        spark25_mlx.__version__,
    ]


def test_public_names() -> None:
    assert {name: getattr(spark25_mlx, name) for name in spark25_mlx.__all__} == {
        "Model": Model,
        "ModelArgs": ModelArgs,
        "enable": plugin.enable,
        "disable": plugin.disable,
        "__version__": spark25_mlx.__version__,
    }
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = spark25_mlx.no_such_name


def test_the_substitute_module_offers_what_mlx_lm_reads() -> None:
    plugin.enable()
    module: ModuleType = importlib.import_module(NATIVE)
    assert (module.Model, module.ModelArgs) == OURS
    assert module.__name__ == NATIVE
