"""Checksums of concatenations, from the checksums of the parts."""

from functools import lru_cache

# Polynomials over GF(2), the highest of 32 bits the coefficient of x^0: CRC-32's without its x^32, 1, and x.
_CRC32, _ONE, _X = 0xEDB88320, 1 << 31, 1 << 30


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """zlib.crc32(a + b) from first = zlib.crc32(a), second = zlib.crc32(b) and second_bytes = len(b).

    A CRC is a remainder modulo its polynomial: appending n bits multiplies it by x^n before they are added.
    """
    return _product(first, _power_of_x(8 * second_bytes)) ^ second


@lru_cache  # shards of one set are equally long but for the last
def _power_of_x(n: int) -> int:
    power, square = _ONE, _X
    while n:
        if n & 1:
            power = _product(power, square)
        square = _product(square, square)
        n >>= 1
    return power


def _product(a: int, b: int) -> int:
    """a b modulo the CRC's polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_CRC32 if b & 1 else 0)  # b x
    return product
