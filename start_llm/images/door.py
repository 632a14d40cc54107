"""Takes in images in each form in which a request may have them."""

from start_llm.core.images import Image
from start_llm.core.recently_used import RecentlyUsed
from start_llm.images.checking import ImageChecker
from start_llm.images.encoded import decode_base64
from start_llm.images.fetching import ImageFetcher
from start_llm.images.problems import is_bad_address, is_no_base64

_LONGEST_HEAD = 256
_BASE64 = ";base64"
_MAX_KEPT_BYTES = 64 * 2**20
_ENTRY_BYTES = 10_000
"""Most that an image takes beside its file, with its address of up to 8,192 characters."""


class ImageDoor:
    """Takes in the images of requests. Safe to use from any thread.

    What was fetched and is an image is kept for its tenant, because conversations name it in every turn.

    Args:
        fetcher: None if the server fetches nothing (IMAGE_URLS).
    """

    def __init__(self, checker: ImageChecker, fetcher: ImageFetcher | None = None) -> None:
        self._checker = checker
        self._fetcher = fetcher
        most = max(_MAX_KEPT_BYTES, checker.limits.max_bytes + _ENTRY_BYTES)
        self._kept = RecentlyUsed[tuple[bytes, str], Image](
            most, lambda image: len(image.data) + _ENTRY_BYTES
        )
        self.max_count = checker.limits.max_count

    def from_base64(self, text: str, start: int = 0) -> Image:
        """Return the image in a text from character `start` on.

        Raises:
            ImageProblem: it is not accepted.
        """
        return self._checker.check(decode_base64(text, start, self._checker.limits.max_bytes))

    def from_url(self, url: str, tenant: bytes, deadline: float) -> Image:
        """Return the image in a data URL, or at an address if the server fetches.

        Args:
            deadline: for fetching, on the clock of `time.monotonic`.

        Raises:
            ImageProblem: it is not accepted.
        """
        if url[:5].lower() == "data:":
            comma = url.find(",", 0, _LONGEST_HEAD)
            if comma < 0 or not url[:comma].rstrip().lower().endswith(_BASE64):
                raise is_no_base64()
            return self.from_base64(url, comma + 1)
        if self._fetcher is None:
            if url[:4].lower() == "http":
                raise is_bad_address("this server fetches nothing (IMAGE_URLS); send a data: URL")
            raise is_bad_address("it must be a data: URL with base64")
        image = self._kept.get((tenant, url))
        if image is None:
            image = self._checker.check(self._fetcher.fetch(url, deadline))
            self._kept.put((tenant, url), image)
        return image
