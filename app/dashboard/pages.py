"""The pages: which there are, and what each is made of."""

from __future__ import annotations

from nicegui import ui

from mac_decoder.api.face import Facing


def register(facing: Facing) -> None:
    """Have NiceGUI answer at the addresses of ``addresses.PAGES``. Once in a process."""

    @ui.page("/")
    async def overview() -> None:
        ui.label(f"Baton serves {facing.facts.served_name}")
