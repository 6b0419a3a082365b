"""What differs between desktops: whether there is a screen, and staying out of the Dock."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import Final

from protocol.errors import ConfigError

_ACCESSORY: Final = 1
"""``NSApplicationActivationPolicyAccessory``: windows and a menu bar item, nothing in the Dock."""

_LOCAL: Final = re.compile(r"(?:unix)?:(\d+)(?:\.\d+)?")


def require_display(environment: Mapping[str, str] = os.environ) -> None:
    """Return if there is a screen to be seen on: Qt would end the process without one.

    Raises ``ConfigError`` (``no_display``).
    """
    if sys.platform == "darwin" or environment.get("QT_QPA_PLATFORM"):
        return
    display = environment.get("DISPLAY", "")
    if environment.get("WAYLAND_DISPLAY") or (display and _answers(display)):
        return
    raise ConfigError(
        "there is no screen that an icon could be shown on",
        reason="no_display",
        field="DISPLAY",
        found=display or None,
        hint="start it in a desktop session; `baton serve` and `baton status` need no screen",
    )


def no_tray() -> ConfigError:
    """The error of a desktop that shows no icons of apps."""
    return ConfigError(
        "this desktop has no place for icons of apps (no system tray)",
        reason="no_tray",
        hint="GNOME has one with the extension AppIndicator, other desktops in the settings of "
        "their panel; `baton status` and the dashboard tell the same",
    )


def before_qt() -> None:
    """Before the application object is made: keep Qt from putting this process into the Dock."""
    os.environ.setdefault("QT_MAC_DISABLE_FOREGROUND_APPLICATION_TRANSFORM", "1")


def stay_out_of_the_dock() -> None:
    """After it is made, on macOS: an accessory, whatever the bundle of the interpreter says."""
    if sys.platform != "darwin":
        return
    path = ctypes.util.find_library("objc")
    if path is None:
        return
    objc = ctypes.cdll.LoadLibrary(path)
    objc.objc_getClass.restype = objc.sel_registerName.restype = ctypes.c_void_p
    objc.objc_getClass.argtypes = objc.sel_registerName.argtypes = [ctypes.c_char_p]
    # objc_msgSend has the type of the method that it sends to.
    address = ctypes.cast(objc.objc_msgSend, ctypes.c_void_p).value
    assert address is not None
    ask = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(address)
    kind = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    application = ask(
        objc.objc_getClass(b"NSApplication"), objc.sel_registerName(b"sharedApplication")
    )
    kind(address)(application, objc.sel_registerName(b"setActivationPolicy:"), _ACCESSORY)


def _answers(display: str) -> bool:
    """Whether somebody is behind a display of this machine; of others that is not asked."""
    found = _LOCAL.fullmatch(display)
    if found is None:
        return True
    path = f"/tmp/.X11-unix/X{found[1]}"
    # The kernel's own names come first, as in Xlib; a container has the file alone.
    for address in (f"\0{path}", path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
            try:
                tried.connect(address)
            except OSError:
                continue
            return True
    return False
