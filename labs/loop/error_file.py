"""What a rank tells torchrun of its failure: a file that is there whole or not at all.

When a rank dies, torchrun ends the others, which may be writing down at that moment that they lost a neighbour. torch's
own handler writes in place, and torchrun gives up ("Expecting value: line 1 column 1") where it finds a file half
written, instead of starting the ranks again (``ProcessFailure.__post_init__``, torch 2.13).
"""

import os

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler


class WholeErrorFile(ErrorHandler):
    """torch's handler for ``record``, which renames the file into its place once it is written."""

    def _get_error_file_path(self) -> str | None:
        path = super()._get_error_file_path()
        return f"{path}.tmp" if path else None

    def record_exception(self, e: BaseException) -> None:
        """Write the error to ``TORCHELASTIC_ERROR_FILE``, where torchrun set one."""
        super().record_exception(e)
        if written := self._get_error_file_path():
            os.replace(written, written.removesuffix(".tmp"))
