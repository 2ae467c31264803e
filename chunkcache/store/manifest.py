"""What a store says about itself: its format, when it was made, and its tenant secret.

The secret lies beside the data in a file of its own, so that a copy of the data alone does not let
its reader compute tenant namespaces.
"""

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from chunkcache.errors import StoreError, StoreFormatError
from chunkcache.store.records import Record

SECRET_NAME = "secret.key"
SECRET_BYTES = 32
MANIFEST_KEY = b"manifest"


class Manifest(Record, frozen=True, kw_only=True):
    """Facts written once, when a store is made.

    Attributes:
        lmdb_version: Version of the LMDB library that made it.
        created_at: Unix seconds.
        secret_digest: BLAKE3 of the tenant secret, so that a swapped key file is noticed.
    """

    lmdb_version: str
    created_at: float
    secret_digest: bytes


def secret_digest(secret: bytes) -> bytes:
    """What the manifest keeps of the secret."""
    return blake3(secret).digest()


def create_secret(directory: Path) -> bytes:
    """Make the tenant secret, or take the one that another process has just made.

    Raises:
        OSError: The directory cannot be written.
        StoreFormatError: A file of that name is there and holds something else.
    """
    with suppress(FileExistsError):
        write_secret(directory, secrets.token_bytes(SECRET_BYTES))
    return read_secret(directory)


def write_secret(directory: Path, secret: bytes) -> None:
    """Write the secret's file, readable by its owner alone.

    It appears whole or not at all: it is written beside and linked into place.

    Raises:
        FileExistsError: It is there already.
        OSError: The directory cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{SECRET_NAME}.", dir=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(descriptor)
        os.link(name, directory / SECRET_NAME)
    finally:
        os.unlink(name)


def read_secret(directory: Path) -> bytes:
    """Read the tenant secret.

    Raises:
        StoreFormatError: It is missing or damaged.
        StoreError: Others than its owner and group may use the file.
    """
    path = directory / SECRET_NAME
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(SECRET_BYTES + 1)
    except FileNotFoundError as error:
        raise StoreFormatError(
            f"{path} is missing: without it no tenant's documents can be found; restore it from "
            "the copy that belongs to this store"
        ) from error
    if len(secret) != SECRET_BYTES:
        raise StoreFormatError(f"{path} does not hold {SECRET_BYTES} bytes")
    if stat.S_IMODE(mode) & stat.S_IRWXO:
        raise StoreError(f"{path} is open to every user of this machine; run: chmod 600 {path}")
    return secret
