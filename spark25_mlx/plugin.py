"""How mlx-lm finds this package's model and uses its caches, and all that this rests on inside mlx-lm.

mlx-lm resolves a `model_type` by importing the module `mlx_lm.models.<model_type>`. While the plugin is
enabled, a finder (`_hook.Finder`) answers the imports of the Spark types, and no others, with
`mlx_lm_module.py`. `enable()` puts the finder there for one process; `register()` for every process of an
environment.

With the model come its caches. The functions of mlx-lm that trim, store, save and load caches and that load
checkpoints get stand-ins (`wiring.py`), which leave other models' to the originals. `enable()` puts them in
place at once. In an environment that is only registered this happens when mlx-lm first looks the model type
up: by then it has opened that first checkpoint and a --prompt-cache-file, so that errors in those two are
mlx's own.

Each seam of mlx-lm is checked before it is used. When one has changed there is one warning that names it, and
mlx-lm's own model stays in use.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from . import __version__, _hook

# Module -> the names in it that the model and its caches build on.
SEAMS = {
    "mlx_lm": ("__version__",),
    "mlx_lm.utils": ("_get_classes", "load_model"),
    "mlx_lm.models.cache": (
        "_BaseCache",
        "KVCache",
        "RotatingKVCache",
        "BatchKVCache",
        "BatchRotatingKVCache",
        "make_prompt_cache",
        "save_prompt_cache",
        "load_prompt_cache",
        "can_trim_prompt_cache",
        "trim_prompt_cache",
        "LRUPromptCache",
        "QuantizedKVCache",
    ),
    "mlx_lm.generate": ("speculative_generate_step", "maybe_quantize_kv_cache"),
}

_SUBSTITUTE = str(Path(__file__).with_name("mlx_lm_module.py"))
_NATIVE = _hook.MODULE_NAMES[0]
# Below mlx_lm.models, because the module imports its neighbours relatively.
_NATIVE_ALIAS = "mlx_lm.models._native_spark2_5"

_PTH_NAME = "spark25_mlx_register.pth"
# site runs the lines that begin with "import"; silent when the package has been uninstalled since.
_PTH_LINE = (
    'import sys; exec("try:\\n from spark25_mlx._hook import at_start\\nexcept ImportError: pass\\n'
    'else: at_start()")\n'
)

_enabled = False
_originals: dict[str, ModuleType] = {}
_warned: set[str] = set()


class SeamWarning(RuntimeWarning):
    """mlx-lm is not as this version of the package expects, and its own model stays in use."""


class RegistrationError(RuntimeError):
    """The environment could not be changed; the message says why and what to do."""


def enable() -> bool:
    """Make mlx-lm use this package's model and caches for `spark2_5` and `sparkx2_5` in this process.

    Holds for all of mlx-lm (load, generate, server, convert, lora, ...), whether or not it imported its own
    module before. Models that are loaded already keep their class, and processes that this one starts need
    `register` or an `enable()` of their own. Enabling twice is the same as once.

    Returns:
        Whether this package's model is in use. If not, a `SeamWarning` has said why.
    """
    global _enabled
    problem = changed_seam()
    if problem is None:
        _enabled = True
        _hook.install()
        for name in _hook.MODULE_NAMES:
            if not _is_ours(sys.modules.get(name)):
                _take_out(name)
                importlib.import_module(name)
        problem = _remapped()
        if problem is None:
            _wiring().connect()
            return True
        disable()
    _warn(problem)
    return False


def disable() -> None:
    """Undo `enable()`, or what `register()` does to this process: mlx-lm uses its own model again.

    A model that is loaded keeps its class and its caches, without the stand-ins that know them: reload it.
    """
    global _enabled
    _enabled = False
    _hook.uninstall()
    if f"{__package__}.wiring" in sys.modules:
        _wiring().disconnect()
    package = sys.modules.get("mlx_lm.models")
    for name in _hook.MODULE_NAMES:
        if not _is_ours(sys.modules.get(name)):
            continue
        del sys.modules[name]
        attribute = name.rpartition(".")[2]
        vars(package).pop(attribute, None)
        original = _originals.pop(name, None)
        if original is not None:
            sys.modules[name] = original
            setattr(package, attribute, original)


def find_spec(name: str) -> ModuleSpec | None:
    """What the finder answers for one of `_hook.MODULE_NAMES`; None leaves it to mlx-lm's own module."""
    if _hook.switched_off() and not _enabled:
        return None
    problem = changed_seam()
    if problem is not None:
        _warn(problem)
        return None
    _wiring().connect()
    return importlib.util.spec_from_file_location(name, _SUBSTITUTE)


def changed_seam() -> str | None:
    """The first thing in mlx-lm that is not as this package needs it, in words; None when all is well."""
    for module_name, names in SEAMS.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            return f"{module_name} cannot be imported ({error})"
        for name in names:
            if not hasattr(module, name):
                return f"{module_name}.{name} does not exist"
    if not _finds_by_module_name():
        return "mlx_lm.utils._get_classes does not import mlx_lm.models.<model_type>"
    try:
        importlib.import_module(f"{__package__}.model")
    except Exception as error:  # whatever it is, mlx-lm's own model still works
        return f"{__package__}.model cannot be imported ({type(error).__name__}: {error})"
    return _wiring().changed()


def native_module() -> ModuleType:
    """mlx-lm's own `mlx_lm.models.spark2_5`, whether or not the plugin is enabled; always the same module.

    Raises:
        ModuleNotFoundError: this mlx-lm has none.
    """
    for loaded in (sys.modules.get(_NATIVE_ALIAS), _originals.get(_NATIVE), sys.modules.get(_NATIVE)):
        if loaded is not None and not _is_ours(loaded):
            return loaded
    own = _native_spec()
    if own is None:
        raise ModuleNotFoundError(f"this mlx-lm has no {_NATIVE}", name=_NATIVE)
    spec = importlib.util.spec_from_file_location(_NATIVE_ALIAS, own.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NATIVE_ALIAS] = module
    spec.loader.exec_module(module)
    return module


def pth_file(site_packages: Path | None = None) -> Path:
    """The file that registers the environment, by default the running interpreter's."""
    return (site_packages or Path(sysconfig.get_path("purelib"))) / _PTH_NAME


def register(site_packages: Path | None = None) -> Path:
    """Make every Python of the environment use this package's model, by one `.pth` file in its site-packages.

    Returns:
        The file.

    Raises:
        RegistrationError: the file cannot be written.
    """
    file = pth_file(site_packages)
    try:
        file.write_text(_PTH_LINE)
    except OSError as error:
        raise RegistrationError(
            f"cannot write {file} ({error.strerror}); install spark25-mlx into a virtual environment of your "
            "own and register there, or use the spark25-mlx commands, which need no registration"
        ) from error
    return file


def unregister(site_packages: Path | None = None) -> Path | None:
    """Undo `register`.

    Returns:
        The file that was removed; None when there was none.

    Raises:
        RegistrationError: the file cannot be removed.
    """
    file = pth_file(site_packages)
    try:
        file.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RegistrationError(f"cannot remove {file} ({error.strerror}); remove it by hand") from error
    return file


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(module, "__file__", None) == _SUBSTITUTE


def _take_out(name: str) -> None:
    """Remember mlx-lm's own module, if loaded, and make the next import of the name start afresh."""
    original = sys.modules.pop(name, None)
    if original is not None:
        _originals[name] = original


def _finds_by_module_name() -> bool:
    """Whether mlx-lm's lookup of a model type that only we know reaches the module of that name."""
    model_type = "_spark25_probe"
    probe = ModuleType(f"mlx_lm.models.{model_type}")
    expected = type("Model", (), {}), type("ModelArgs", (), {})
    vars(probe).update(zip(("Model", "ModelArgs"), expected, strict=True))
    sys.modules[probe.__name__] = probe
    try:
        return _classes({"model_type": model_type}) == expected
    except Exception:  # a lookup that fails, in whatever way, is not the one we know
        return False
    finally:
        sys.modules.pop(probe.__name__, None)


def _remapped() -> str | None:
    """Why mlx-lm's lookup does not reach the modules that stand in for its own; None when it does."""
    for name in _hook.MODULE_NAMES:
        module, model_type = sys.modules[name], name.rpartition(".")[2]
        try:
            found = _classes({"model_type": model_type, "architectures": ["Spark2_5ForCausalLM"]})
        except ValueError as error:
            return f"mlx_lm.utils._get_classes fails for {model_type} ({error})"
        if found != (module.Model, module.ModelArgs):
            return f"mlx_lm.utils._get_classes finds {found[0].__module__} for {model_type}"
    return None


def _classes(config: dict[str, Any]) -> tuple[type, type]:
    return importlib.import_module("mlx_lm.utils")._get_classes(config)


def _wiring() -> ModuleType:
    """Loaded late, because it loads mlx and the model."""
    return importlib.import_module(f"{__package__}.wiring")


def _native_spec() -> ModuleSpec | None:
    try:
        package = importlib.import_module("mlx_lm.models")
    except ImportError:
        return None
    return PathFinder.find_spec(_NATIVE, package.__path__)


def _warn(problem: str) -> None:
    """Say once what has changed and which model mlx-lm uses now."""
    if problem in _warned:
        return
    _warned.add(problem)
    version = getattr(sys.modules.get("mlx_lm"), "__version__", "(version unknown)")
    fallback = "mlx-lm's own model stays in use" if _native_spec() else "mlx-lm has none of its own"
    warnings.warn(
        f"spark25_mlx {__version__} cannot serve spark2_5 in mlx-lm {version}: {problem}; {fallback}",
        SeamWarning,
        stacklevel=3,
    )
