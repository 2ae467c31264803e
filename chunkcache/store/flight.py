"""A computation or a read of one entry that is under way, for those who wait for it."""

import threading

from chunkcache.entry import Entry
from chunkcache.store.tier import MissReason, NotStored


class Flight:
    """One computation or disk read under way; others who want the key wait for it."""

    def __init__(self, miss: MissReason) -> None:
        self.miss = miss
        self.owner = threading.get_ident()
        self.done = threading.Event()
        self.entry: Entry | None = None
        self.warning: NotStored | None = None
        self.error: BaseException | None = None
        self.is_dropped = False
        self.is_forgotten = False
