"""The functions of an artifact's cubins, loaded through the CUDA driver: all of them while torch is imported, if begun
then, which takes longer. Imports no torch."""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphllm.host.cuda_driver import CudaDriver, CudaError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 * 1024  # bytes that a program may have without asking


class CudaFunctions:
    """By cubin and symbol. Each is loaded when it is first asked for, if it is not there by then."""

    def __init__(self, folder: Path) -> None:
        """folder: of the artifact's pieces."""
        self._folder = folder
        self._loaded: dict[tuple[str, str], ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def driver(self) -> CudaDriver:
        return CudaDriver()

    def begin(self) -> None:
        """Make the context of the first device and load all functions, in a thread. What fails is left to whoever needs
        it, and says so there."""
        threading.Thread(target=self._load_all, name="graphllm-cubins", daemon=True).start()

    def get(self, kernel: Mapping[str, Any]) -> ctypes.c_void_p:
        """The function of a kernel of a piece, for the calling thread's context. Raises CudaError."""
        key = (kernel["cubin"], kernel["symbol"])
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = self._load(kernel)
            return self._loaded[key]

    def _load(self, kernel: Mapping[str, Any]) -> ctypes.c_void_p:
        image = (self._folder / kernel["cubin"]).read_bytes()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.driver.call("cuModuleLoadData", ctypes.byref(module), image)
        self.driver.call("cuModuleGetFunction", ctypes.byref(function), module, kernel["symbol"].encode())
        if kernel["shared"] > _DEFAULT_SHARED:
            self.driver.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, kernel["shared"])
        return function

    def _load_all(self) -> None:
        try:
            self.driver.enter()
            for piece in sorted(self._folder.glob("*.json")):
                for kernel in json.loads(piece.read_text())["kernels"].values():
                    if "cubin" in kernel:
                        self.get(kernel)
        except (CudaError, OSError):
            return
