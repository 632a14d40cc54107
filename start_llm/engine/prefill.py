"""Prefill of one prompt, chunk by chunk, and of several short ones together."""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from start_llm.core.events import Prefilling
from start_llm.core.images import ImageSpan
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine import merging
from start_llm.engine.image_reader import ImageReader
from start_llm.engine.resources import EngineResources
from start_llm.engine.sequence import EngineSequence
from start_llm.engine.shifted_cache import shifted
from start_llm.models.vision import ImageChunk, ImageFeatures


@owned_by(ENGINE)
class Prefill:
    """Computes a sequence's tokens into its caches, all but the last: its prompt, and what it had generated
    when it was preempted.

    The first decode step computes the last token. So there is always a token to sample from (lesson 3). A
    chunk is text, or belongs to one image. Before the first chunk of an image, `look` has to be called.

    Args:
        checkpoint_positions: where state is kept.
        passes_checkpoints: a chunk need not end there; see `PromptCache`.
        reader: reads the images; None if the model reads none.

    Raises:
        ValueError: the prompt has images, and the model reads none.
    """

    def __init__(
        self,
        resources: EngineResources,
        sequence: EngineSequence,
        checkpoint_positions: tuple[int, ...] = (),
        reader: ImageReader | None = None,
        *,
        passes_checkpoints: bool = False,
    ) -> None:
        if sequence.images.spans and reader is None:
            raise ValueError("this model reads no images")
        self._resources = resources
        self._reader = reader
        self._seen: tuple[ImageSpan, ImageFeatures] | None = None
        self.sequence = sequence
        self.checkpoint_positions = checkpoint_positions
        self._stops = () if passes_checkpoints else checkpoint_positions
        self.done = len(sequence.seq_cache.tokens)

    @property
    def total(self) -> int:
        return len(self.sequence.tokens)

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the first decode step."""
        return self.total - 1 - self.done

    @property
    def is_complete(self) -> bool:
        return self.remaining == 0

    @property
    def is_at_checkpoint(self) -> bool:
        return self.done in self.checkpoint_positions

    def pieces_since(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of tokens since `start` that were computed, cut at the checkpoint positions."""
        passed = (position for position in self.checkpoint_positions if start < position < self.done)
        for end in (*passed, self.done):
            yield start, end
            start = end

    @property
    def image(self) -> ImageSpan | None:
        """The image to which the next chunk belongs."""
        return self.sequence.images.span_at(self.done)

    @property
    def must_look(self) -> bool:
        """True if the tower has to run for the next chunk, which takes its time."""
        span = self.image
        if span is None or self._reader is None or (self._seen and self._seen[0] is span):
            return False
        return not self._reader.knows(span.run, self._salt)

    def look(self) -> None:
        """Make the next image ready.

        Raises:
            ValueError: no image is next.
        """
        if self._reader is None or self.image is None:
            raise ValueError("there is no image to look at")
        self._seen = (self.image, self._reader.look(self.image.run, self._salt))

    @property
    def _salt(self) -> bytes:
        return self.sequence.generation.request.salt

    def chunk_length(self, most: int) -> int:
        """Return the length of the next chunk, in tokens, if it should have at most `most`."""
        return self._end(most) - self.done

    def step(self, most: int) -> int:
        """Compute one chunk of at most `most` tokens and report progress. Returns its length.

        An image that has to be computed as a whole is one chunk, however long it is.
        """
        end = self._end(most)
        if end == self.done:
            return 0
        self._resources.mount(self.sequence.adapters)
        if self.image:
            self._compute_image(self.image, end)
        else:
            shift = self.sequence.images.shift_at(self.done)
            chunk = mx.array([self.sequence.tokens[self.done : end]])
            self._resources.network(chunk, cache=shifted(self.sequence.layer_caches, shift))
        mx.eval([layer.state for layer in self.sequence.layer_caches])
        mx.clear_cache()
        return self._advance(end)

    def _advance(self, end: int) -> int:
        """Report that the tokens up to `end` are computed, and return how many were not before."""
        computed = end - self.done
        self.done = end
        if self._seen and self._seen[0].end <= end:
            self._seen = None
        if not self.sequence.has_begun:
            self.sequence.generation.emit(Prefilling(self.done, self.total))
        return computed

    def step_with(self, others: Sequence["Prefill"]) -> list[int]:
        """Compute the next chunk of this prompt and of others in one forward pass; see `step`.

        Each is computed up to where it has to stop, or its end. If this raises, none has usable caches.

        Args:
            others: of the same network and adapters. None of them has images, and all have tokens to compute.

        Returns:
            The length of each chunk, in tokens.
        """
        prefills = [self, *others]
        ends = [prefill._end(prefill.remaining) for prefill in prefills]
        chunks = [
            prefill.sequence.tokens[prefill.done : end] for prefill, end in zip(prefills, ends, strict=True)
        ]
        self._resources.mount(self.sequence.adapters)
        fed = merging.feed(
            self._resources.network, [prefill.sequence.layer_caches for prefill in prefills], chunks
        )
        for prefill, caches in zip(prefills, fed, strict=True):
            prefill.sequence.take_caches(caches)
        mx.clear_cache()
        return [prefill._advance(end) for prefill, end in zip(prefills, ends, strict=True)]

    def _end(self, most: int) -> int:
        edge = self.sequence.images.edge_after(self.done, self.total)
        if self.image and self._reader and self._reader.vision.reads_both_ways:
            return edge
        next_stop = next((stop for stop in self._stops if stop > self.done), self.total)
        return min(self.done + most, self.total - 1, next_stop, edge)

    def _compute_image(self, span: ImageSpan, end: int) -> None:
        reader, features = self._reader, self._features_of(span)
        if reader is None or features is None:
            raise ValueError("the vision tower has not run on the image")
        start, stop = self.done - span.start, end - span.start
        positions = self.sequence.images.positions(span, self.done, end)
        chunk = ImageChunk(start, stop, span.run.network_ids[start:stop], positions)
        reader.vision.compute(features, chunk, self.sequence.layer_caches)

    def _features_of(self, span: ImageSpan) -> ImageFeatures | None:
        """Return what the tower has seen of an image, in this prompt or in another one."""
        if self._reader and not (self._seen and self._seen[0] is span):
            known = self._reader.known(span.run, self._salt)
            self._seen = (span, known) if known else None
        return self._seen[1] if self._seen else None
