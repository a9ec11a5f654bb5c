"""Files in memory that processes of the same host map: buckets of weights, for generators beside the learner.

They are the kernel's own (memfd): in no folder, not of the size of /dev/shm, and gone with the last process that has
one open or mapped, however that ends. Others open one by this process's entry in /proc, which the kernel allows within
one PID namespace and to the same user. None can be cut shorter under a mapping.
"""

import errno
import fcntl
import logging
import mmap
import os
import resource
import secrets
import weakref

import numpy as np
import numpy.typing as npt

from protocol.fleet import SharedMemory, SharedMemoryAnswer

logger = logging.getLogger(__name__)

_SHARE_OF_FILES = 4
"""Of the files that this process may have open, one in so many at most is shared memory."""


class SharedFile:
    """A file of `nbytes` zeros, open until it is let go of. Raises OSError."""

    def __init__(self, nbytes: int) -> None:
        name = f"headway-{secrets.token_hex(8)}"
        self._file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file).atexit = False
        os.ftruncate(self._file, nbytes)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._nbytes = nbytes
        self._lent = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        """Of the file, for other processes."""
        self.link = os.readlink(self.path)
        """Target of that path; it has a random part."""
        if self.link != f"/memfd:{name} (deleted)":
            raise OSError(
                errno.ENOENT, f"{self.path} leads to {self.link}: /proc is not of the PID namespace of this process"
            )

    def mapped(self) -> npt.NDArray[np.uint8]:
        """Its bytes [nbytes], to be written to; they keep the memory, not the file."""
        return np.frombuffer(mmap.mmap(self._file, self._nbytes), dtype=np.uint8)

    @property
    def is_lent(self) -> bool:
        """True if a generator may still read it: its bytes must stay as they are."""
        return self._lent > 0

    def lend(self) -> None:
        """Count a generator that is told to read it."""
        self._lent += 1

    def take_back(self) -> None:
        """Uncount a generator that has loaded what it read."""
        self._lent -= 1


class SharedFiles:
    """Makes files, as long as this system and the limit of open files allow it."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[SharedFile] = weakref.WeakSet()
        self._refused = False

    def make(self, nbytes: int) -> SharedFile | None:
        """A new file; None, with a line in the log the first time, if there is none to be had."""
        try:
            if len(self._open) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE_OF_FILES:
                raise OSError(errno.EMFILE, f"{len(self._open)} buckets are open as files already")
            made = SharedFile(nbytes)
        except (OSError, AttributeError) as error:  # a system other than Linux has none of these calls
            if not self._refused:
                self._refused = True
                logger.warning(
                    "new weights are broadcast to generators on this host, too, since there is no shared memory for "
                    "them: %s; a larger weights.bucket_mb needs fewer files, and weights.same_host = broadcast none",
                    error,
                )
            return None
        self._open.add(made)
        return made


class HostProof:
    """A secret in a file: who can say it can open this process's files. Raises OSError."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)
        self._file = SharedFile(len(self._secret))
        self._file.mapped()[:] = np.frombuffer(self._secret.encode(), dtype=np.uint8)

    @property
    def question(self) -> SharedMemory:
        """The request to a generator."""
        return SharedMemory(path=self._file.path, link=self._file.link)

    def is_shown_by(self, answer: SharedMemoryAnswer) -> bool:
        """True if the generator has read the secret."""
        return secrets.compare_digest(answer.secret.encode(), self._secret.encode())
