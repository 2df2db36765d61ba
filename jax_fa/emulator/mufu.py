"""ex2.approx, lg2.approx and rcp.approx to the last bit.

The special function unit interpolates: the leading bits of an argument's fraction select a row
(c0, c1, c2) of a table, and the bits below, x, give

    c0 + c1 x + c2 square(x)

in fixed point, cut off to the bits of the result. ``square`` sums partial products of bits of x and
leaves out those that lie below 2 ** -15 of its largest value. This is the design of Oberman and
Siu, "A High-Performance Area-Efficient Multifunction Interpolator" (ARITH 2005); coefficients and
widths were derived from everything that an H200 answers for arguments in [1, 2), and then gave
every bit of all other answers that were looked at (``tests/emulator/test_hardware.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

U4, F4, I4, I8 = np.uint32, np.float32, np.int32, np.int64
_NAN = U4(0x7FFFFFFF).view(F4)
_INFINITY = F4(np.inf)
_FRACTION = I8((1 << 23) - 1)
_FRACTION_4 = I4(_FRACTION)
_TINY = np.float32(2.0**-126)


def _truncated_square(bits: int) -> np.ndarray:
    """Squares of all numbers of that many bits, over 2 ** (2 * bits), in units of 2 ** -15."""
    x = np.arange(1 << bits)
    digit = [x >> i & 1 for i in range(bits)]
    dropped = 2 * bits - 15
    total = np.zeros(len(x), np.int64)
    for i in range(bits):
        for j in range(i + 1):
            weight = 2 * i if i == j else i + j + 1
            if weight >= dropped:
                total += (digit[i] & digit[j]) << weight - dropped
    return total


@dataclass
class _Table:
    """One function's rows.

    Attributes:
      bias: added to c0, which has three bits below those of the result, in units of 2 ** -12.
      c0, c1, c2: the rows, as text.
    """

    bias: int
    c0: str
    c1: str
    c2: str
    bits: int = field(init=False)

    def __post_init__(self) -> None:
        first, slope, curve = (np.array(text.split(), I8) for text in (self.c0, self.c1, self.c2))
        self.bits = 23 - (len(first).bit_length() - 1)
        # In units of 2 ** -bits of the result's last place, as the products are.
        self.first = ((first << I8(12)) + self.bias) << I8(self.bits - 15)
        self.slope, self.curve = slope, curve << I8(self.bits - 15)
        self.square = _truncated_square(self.bits)

    def __call__(self, fraction: np.ndarray) -> np.ndarray:
        """The function of a fraction of 23 bits (int64), in units of 2 ** -bits."""
        row, x = fraction >> I8(self.bits), fraction & I8((1 << self.bits) - 1)
        return self.first[row] + self.slope[row] * x + self.curve[row] * self.square[x]


_EX2 = _Table(
    bias=2018,
    c0="""
        7 730773 1469501 2216267 2971173 3734291 4505721 5285555 6073881 6870787 7676369 8490731
        9313955 10146145 10987399 11837811 12697483 13566517 14445011 15333077 16230809 17138321
        18055709 18983091 19920571 20868259 21826267 22794709 23773693 24763339 25763765
        26775079 27797407 28830871 29875587 30931675 31999267 33078485 34169455 35272301
        36387159 37514157 38653429 39805103 40969319 42146213 43335923 44538587 45754351
        46983349 48225731 49481645 50751233 52034645 53332031 54643547 55969345 57309577
        58664405 60033985 61418481 62818053 64232863 65663081
    """,
    c1="""
        90852 91840 92840 93852 94872 95908 96952 98008 99072 100152 101244 102344 103460 104588
        105724 106876 108040 109216 110408 111608 112824 114052 115296 116552 117820 119104
        120400 121712 123036 124376 125728 127100 128484 129884 131296 132728 134172 135632
        137108 138604 140112 141636 143180 144740 146316 147908 149520 151148 152792 154456
        156140 157840 159556 161296 163052 164828 166620 168436 170272 172124 174000 175892
        177808 179744
    """,
    c2="""
        494 501 506 511 518 521 527 532 541 546 551 559 564 568 577 583 589 596 600 609 615 622
        627 633 641 647 655 661 670 677 686 691 699 705 715 721 730 739 748 753 763 773 779 787
        796 806 813 822 833 842 849 858 870 877 887 896 909 917 925 938 946 959 969 980
    """,
)

_LG2 = _Table(
    bias=837,
    c0="""
        7 1501082 2979248 4435178 5869541 7282962 8676044 10049363 11403483 12738917 14056184
        15355769 16638140 17903743 19153023 20386388 21604233 22806955 23994917 25168476
        26327983 27473763 28606145 29725438 30831938 31925933 33007706 34077525 35135650
        36182341 37217834 38242366 39256173 40259472 41252485 42235415 43208464 44171830
        45125709 46070275 47005716 47932209 48849920 49759008 50659645 51551985 52436169
        53312352 54180676 55041283 55894308 56739878 57578134 58409191 59233179 60050209
        60860399 61663869 62460730 63251080 64035037 64812691 65584149 66349508
    """,
    c1="""
        189088 186180 183360 180624 177968 175388 172884 170448 168080 165776 163536 161356
        159236 157168 155152 153188 151272 149404 147584 145804 144072 142376 140720 139104
        137520 135976 134464 132988 131544 130128 128744 127388 126064 124764 123488 122244
        121020 119820 118648 117496 116364 115256 114168 113104 112056 111028 110020 109028
        108052 107096 106160 105236 104328 103436 102560 101696 100852 100016 99196 98392 97596
        96816 96048 95292
    """,
    c2="""
        -1454 -1410 -1370 -1330 -1292 -1254 -1220 -1184 -1152 -1118 -1088 -1060 -1036 -1008 -982
        -958 -932 -910 -890 -866 -850 -828 -808 -792 -770 -754 -736 -722 -708 -692 -678 -662
        -652 -638 -622 -614 -600 -586 -578 -566 -552 -542 -532 -524 -514 -506 -498 -488 -476
        -468 -464 -454 -446 -438 -432 -422 -418 -408 -402 -398 -390 -384 -378 -372
    """,
)

_RCP = _Table(
    bias=2023,
    c0="""
        134217728 133177284 132152844 131144042 130150524 129171952 128207984 127258292
        126322568 125400508 124491810 123596182 122713354 121843048 120984998 120138948
        119304650 118481860 117670340 116869860 116080198 115301138 114532462 113773972
        113025458 112286732 111557596 110837868 110127372 109425922 108733354 108049494
        107374186 106707266 106048576 105397974 104755302 104120424 103493192 102873474
        102261130 101656034 101058058 100467076 99882964 99305606 98734884 98170684 97612898
        97061410 96516120 95976928 95443722 94916408 94394888 93879068 93368858 92864164
        92364892 91870960 91382286 90898784 90420370 89946962 89478488 89014872 88556032
        88101896 87652398 87207460 86767020 86331006 85899350 85471990 85048860 84629900
        84215050 83804244 83397428 82994540 82595528 82200336 81808906 81421186 81037122
        80656666 80279766 79906372 79536436 79169910 78806742 78446896 78090318 77736968
        77386802 77039776 76695848 76354978 76017126 75682246 75350308 75021266 74695086
        74371732 74051164 73733346 73418248 73105830 72796060 72488904 72184328 71882302
        71582792 71285768 70991198 70699056 70409304 70121918 69836872 69554128 69273670
        68995464 68719482 68445698 68174088 67904626 67637282 67372038
    """,
    c1="""
        -131068 -129044 -127066 -125134 -123244 -121398 -119594 -117828 -116102 -114414 -112762
        -111144 -109562 -108014 -106498 -105014 -103560 -102136 -100742 -99376 -98038 -96726
        -95442 -94182 -92946 -91736 -90548 -89384 -88242 -87120 -86022 -84942 -83884 -82846
        -81826 -80824 -79842 -78878 -77930 -77000 -76086 -75188 -74306 -73440 -72588 -71752
        -70928 -70120 -69326 -68544 -67776 -67022 -66280 -65548 -64830 -64124 -63428 -62746
        -62072 -61410 -60758 -60118 -59486 -58864 -58254 -57652 -57058 -56474 -55900 -55334
        -54776 -54228 -53686 -53154 -52628 -52112 -51602 -51100 -50604 -50116 -49636 -49162
        -48696 -48234 -47780 -47334 -46892 -46456 -46028 -45604 -45186 -44776 -44368 -43968
        -43574 -43184 -42798 -42418 -42044 -41674 -41310 -40950 -40594 -40244 -39898 -39556
        -39218 -38886 -38556 -38232 -37912 -37594 -37282 -36974 -36668 -36368 -36070 -35776
        -35486 -35200 -34916 -34636 -34360 -34086 -33816 -33550 -33286 -33026
    """,
    c2="""
        1013 989 966 945 923 902 883 863 845 827 809 791 774 758 742 727 711 696 682 669 656 642
        631 618 605 594 582 572 561 549 540 529 519 510 501 490 482 474 465 457 449 441 433 426
        418 412 403 397 390 383 377 371 366 358 353 348 341 337 331 326 320 316 310 305 302 297
        291 287 283 279 274 271 266 263 258 256 251 248 243 240 237 233 231 226 223 222 218 214
        212 208 205 204 199 197 196 193 189 186 184 182 180 178 175 173 171 169 166 165 161 160
        159 155 154 153 150 149 147 145 143 143 140 138 137 135 133 132 131 130
    """,
)


TABLES = {"ex2": _EX2, "lg2": _LG2, "rcp": _RCP}
"""By the names of the instructions."""


@cache
def _exp2_corrections() -> np.ndarray:
    """What turns a number of 23 fraction bits into the bits of its exponential, by fraction.

    Softmax spends much of its time here, so all 2 ** 23 are tabulated, at the first call.
    """
    return np.concatenate(
        [
            ((_EX2(part) >> I8(_EX2.bits)) - part + (127 << 23)).astype(I4)
            for part in np.split(np.arange(1 << 23), 256)  # intermediates stay in a cache
        ]
    )


def exp2(x: np.ndarray) -> np.ndarray:
    """ex2.approx.ftz.f32: 2 ** x, subnormal results flushed to zero."""
    # Fixed point with 23 bits, cut off; negative numbers in ones' complement, but for whole ones.
    fixed = (np.minimum(np.maximum(x, F4(-200)), F4(200)) * F4(1 << 23)).astype(I4)
    fraction = fixed & _FRACTION_4
    below = (fixed < 0) & (fraction != 0)
    if np.count_nonzero(below):
        fixed -= below
        fraction = fixed & _FRACTION_4
    result = (fixed + _exp2_corrections()[fraction]).view(F4)
    is_usual = np.abs(x) <= 126
    if np.count_nonzero(is_usual) < len(x):
        result[fixed >= 128 << 23] = _INFINITY
        result[fixed < -126 << 23] = 0
        result[np.isnan(x)] = _NAN
    return result


def log2(x: np.ndarray) -> np.ndarray:
    """lg2.approx.ftz.f32: subnormal arguments are zeros."""
    bits = x.view(U4).astype(I8)
    fraction = bits & _FRACTION
    # In units of 2 ** -36.
    value = _LG2(fraction) >> I8(_LG2.bits - 13)
    value += (bits >> I8(23)) - I8(127) << I8(36)
    # Negative numbers are in ones' complement.
    size = np.where(value < 0, ~value, value).astype(np.float64)
    size = (size.view(I8) & I8(-1 << 29)).view(np.float64)  # cut off to 24 bits
    result = np.copysign(size * 2.0**-36, value).astype(F4)
    result[x == 1] = 0
    result[np.abs(x) < _TINY] = -_INFINITY
    result[np.isposinf(x)] = _INFINITY
    result[(x <= -_TINY) | np.isnan(x)] = _NAN
    return result


def reciprocal(x: np.ndarray) -> np.ndarray:
    """rcp.approx.ftz.f32: subnormal arguments and results are zeros."""
    bits = x.view(U4).astype(I8)
    exponent, fraction = bits >> I8(23) & I8(0xFF), bits & _FRACTION
    mantissa = _RCP(fraction) >> I8(_RCP.bits)
    mantissa[fraction == 0] = 1 << 24
    # The mantissa's leading bit adds one to the exponent.
    size = (I8(252) - exponent << I8(23)) + mantissa
    size[size < 1 << 23] = 0
    size[exponent == 0] = 0xFF << 23
    size[exponent == 0xFF] = 0
    result = (size | bits & I8(1 << 31)).astype(U4).view(F4)
    result[np.isnan(x)] = _NAN
    return result
