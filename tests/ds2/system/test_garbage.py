"""Garbage collections that do not pause a server or a training."""

import gc

from ds2.system.garbage import short_collections


def test_collections_leave_out_what_was_there_before() -> None:
    gc.unfreeze()
    with short_collections():
        assert gc.get_freeze_count() > len(gc.get_objects())
    assert gc.get_freeze_count() == 0
