"""Reads sizes of images and lengths of sounds from file headers, and decodes files only to check them."""

from __future__ import annotations

import math
import stat
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import soundfile
from PIL import ExifTags, Image, ImageOps

from optimus.data.jsonl_file import SkippedSample, SkipReason
from optimus.data.media_bytes import EmbeddedMedia, Media

IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # the others of Pillow are not tried
MAX_PIXELS = 89_478_485  # as Pillow's limit against decompression bombs: 256 MB of RGB
MAX_AUDIO_S = 1800
BLOCK_FRAMES = 1 << 16
MAX_PATH = 4096
TRANSPOSED = (5, 6, 7, 8)  # values of EXIF's orientation that swap height and width


@dataclass(frozen=True, kw_only=True)
class MediaFolder:
    """The folder that relative paths start from and that no path leaves."""

    root: Path
    decode: bool = False  # files whose contents are broken are skipped too
    max_pixels: int = MAX_PIXELS  # of an image; larger ones are skipped
    max_audio_s: int = MAX_AUDIO_S

    @cached_property
    def _resolved(self) -> Path:
        return self.root.resolve()

    def find(self, path: str | EmbeddedMedia) -> Media:
        """Returns a regular file inside the folder; raises SkippedSample for anything else.

        Embedded media need no file.
        """
        if not isinstance(path, str):
            return path
        if "://" in path or path.startswith("data:"):
            raise SkippedSample(SkipReason.NOT_LOCAL, path)
        if not path or len(path) > MAX_PATH:
            raise SkippedSample(SkipReason.MISSING_FILE, path)
        try:
            found = (self._resolved / path).resolve()
            if not found.is_relative_to(self._resolved):
                raise SkippedSample(SkipReason.OUTSIDE, path)
            if not stat.S_ISREG(found.stat().st_mode):  # opening a pipe would wait for its writer
                raise SkippedSample(SkipReason.BAD_FILE, f"{path} is no regular file")
        except (OSError, ValueError, RuntimeError):  # a zero byte, a lone surrogate, a loop of links
            raise SkippedSample(SkipReason.MISSING_FILE, path) from None
        return found


def read_image_size(path: Media, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Returns height and width of an image as transformers loads it: turned as its EXIF says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images and odd tags
            with _open(path) as stream, Image.open(stream, formats=IMAGE_FORMATS) as image:
                width, height = image.size
                # Pillow decodes a PNG to look for EXIF behind its pixels.
                known = image.format != "PNG" or "exif" in image.info
                turned = known and image.getexif().get(ExifTags.Base.Orientation) in TRANSPOSED
    except Image.DecompressionBombError:
        raise SkippedSample(SkipReason.TOO_LARGE, f"{path.name} has too many pixels") from None
    except Exception as error:  # hostile bytes make readers raise almost anything
        raise SkippedSample(SkipReason.BAD_FILE, f"{path.name}: {_first_line(error, path)}") from None
    if width * height > max_pixels:
        detail = f"{path.name} has {width} x {height} pixels; at most {max_pixels:,}"
        raise SkippedSample(SkipReason.TOO_LARGE, detail)
    if width < 1 or height < 1:
        raise SkippedSample(SkipReason.BAD_FILE, f"{path.name} has {width} x {height} pixels")
    return (width, height) if turned else (height, width)


def decode_image(path: Media) -> Image.Image:
    """Decodes an image whose size was read, as transformers does: turned as its EXIF says, in RGB.

    Raises SkippedSample if its contents are broken. Trouble of this host alone (memory, a file that only it
    cannot read) is raised as it is: another rank would not skip the sample.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _open(path) as stream, Image.open(stream, formats=IMAGE_FORMATS) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # decoders raise an OSError without a number
        raise SkippedSample(SkipReason.BAD_FILE, f"{path.name}: {_first_line(error, path)}") from None


def count_audio_samples(path: Media, sampling_rate: int, max_s: int = MAX_AUDIO_S) -> int:
    """Returns the length of a sound in samples, resampled to `sampling_rate`.

    libsndfile states the exact number of frames of WAV, FLAC, OGG and MP3; the `wave` module of Python reads
    uncompressed WAV alone.
    """
    try:
        with _open(path) as stream:
            info = soundfile.info(stream)
        frames, rate = int(info.frames), int(info.samplerate)
    except Exception as error:
        raise SkippedSample(SkipReason.BAD_FILE, f"{path.name}: {_first_line(error, path)}") from None
    if frames < 1 or rate < 1:
        raise SkippedSample(SkipReason.BAD_FILE, f"{path.name} has {frames} frames at {rate} Hz")
    if frames > max_s * rate:
        detail = f"{path.name} takes {frames / rate:,.0f} s; at most {max_s:,}"
        raise SkippedSample(SkipReason.TOO_LARGE, detail)
    return math.ceil(frames * sampling_rate / rate)


def check_audio(path: Media) -> None:
    """Decodes a sound whose length was read; raises SkippedSample if it is shorter than its header says."""
    try:
        with _open(path) as stream, soundfile.SoundFile(stream) as sound:
            stated = int(sound.frames)
            decoded = sum(len(block) for block in sound.blocks(BLOCK_FRAMES, dtype="float32"))
    except Exception as error:
        raise SkippedSample(SkipReason.BAD_FILE, f"{path.name}: {_first_line(error, path)}") from None
    if decoded != stated:
        raise SkippedSample(SkipReason.BAD_FILE, f"{path.name} has {decoded:,} of {stated:,} frames")


def _open(path: Media) -> AbstractContextManager[Any]:
    """Returns what Pillow and libsndfile open: a path, or a stream that is closed behind them."""
    return nullcontext(str(path)) if isinstance(path, Path) else path.open()


def _first_line(error: BaseException, path: Media) -> str:
    """Returns an error's first line without the folder, which differs from machine to machine."""
    return (str(error).replace(str(path), path.name).splitlines() or [type(error).__name__])[0]
