"""What MLX multiplies with, in processes of their own: what is loaded once stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mac_decoder.blas import AUTO, BUNDLED, use
from protocol.errors import ConfigError

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX brings its own BLAS on Linux only")

_MULTIPLY = """
import hashlib, sys
from mac_decoder.blas import use
used = use(sys.argv[1])
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)
given = mx.array(np.random.default_rng(1).standard_normal((192, 577), np.float32))
print(hashlib.sha256(np.array(given @ given.T)).hexdigest(), used)
"""


def multiplied(choice: str) -> tuple[str, str]:
    """A digest of a product, and what was used for it."""
    command = [sys.executable, "-c", _MULTIPLY, choice]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    digest, _, used = done.stdout.strip().partition(" ")
    return digest, used


@linux
def test_the_systems_openblas_takes_the_place_of_mlxs_own() -> None:
    digest, used = multiplied(AUTO)
    if not used:
        pytest.skip("there is no OpenBLAS here")
    # Their sums are of another order, so the last bits tell which of them it was.
    assert digest != multiplied(BUNDLED)[0]
    assert multiplied(used) == (digest, used)


def test_nothing_is_loaded_for_the_bundled_one() -> None:
    assert use(BUNDLED) == ""


@linux
@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_file_that_is_no_blas_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "libblas.so"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        use(str(file))
    assert (caught.value.reason, caught.value.field) == ("blas_unusable", "blas")


@linux
def test_a_library_without_the_product_is_named() -> None:
    with pytest.raises(ConfigError, match="cblas_sgemm"):
        use("libc.so.6")
