"""Claims of the documents, each with its place, its study and the rule that decides on it.

The effects are the documents' own differences, in points of the metric they print.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.findings.rules import Above, AsGood, Beyond, Every, Rule

ZHU = "Zhu et al. 2019"
BELLO = "Bello et al. 2019"
THESIS = "Thesis"
LECTURE = "Lecture"


@dataclass(frozen=True)
class Claim:
    """A claim, which is a row of the table.

    Attributes:
        text: Statement of the document.
        document: Short name of the document.
        place: Table, figure or section.
        study: Name of the study; empty if no small data can test the claim.
        rule: Rule that derives an outcome from the study's samples.
        note: Limits of the test, or its differences from the document's.
    """

    text: str
    document: str
    place: str
    study: str
    rule: Rule
    note: str = ""


_SHORT = "short entries of nearly the same word order"
_PARTS = ("1500 updates/", "1500 updates, second run/", "4000 updates/")
_ONE_NET = "a small network on two thousand crops"

ZHU_CLAIMS = (
    Claim("cross-attention needs ε1: without it accuracy drops", ZHU, "4.2 (2), Fig. 3d", "cross-attention",
          Above("1111", "cross-0111"), "two languages of different word order"),
    Claim("cross-attention by ε2 and ε3 is worse than by all terms", ZHU, "4.2 (2), Fig. 3d", "cross-attention",
          Above("1111", "cross-0110"), "two languages of different word order"),
    Claim("cross-attention by ε1 alone is almost as good as by all terms", ZHU, "4.2 (2), Fig. 3d", "cross-attention",
          AsGood("cross-1000", "1111", 1.0), "two languages of different word order"),
    Claim("self-attention does not need ε1", ZHU, "4.2 (1), Fig. 3c", "cross-attention",
          AsGood("self-0111", "1111", 1.0), "cross-attention has all terms"),
    Claim("cross-attention needs ε1", ZHU, "4.2 (2), Fig. 3d", "translation",
          Above(f"{_PARTS[2]}1111", f"{_PARTS[2]}cross-0111", p=0.001), _SHORT),
    Claim("cross-attention by ε1 alone is almost as good as by all terms", ZHU, "4.2 (2), Fig. 3d", "translation",
          AsGood(f"{_PARTS[2]}cross-1000", f"{_PARTS[2]}1111", 1.0, p=0.001),
          f"{_SHORT}; it was still gaining faster than `1111`"),
    Claim("without self-attention BLEU falls (27.7 to 20.9)", ZHU, "Table 2", "translation",
          Above(f"{_PARTS[1]}1111", f"{_PARTS[1]}none", 6.8, p=0.001), _SHORT),
    Claim("self-attention `0110` is as good as `1111` (27.6, 27.7)", ZHU, "4.2 (3), Table 2", "translation",
          AsGood(f"{_PARTS[0]}0110", f"{_PARTS[0]}1111", 1.0), _SHORT),
    Claim("'0010 + deformable' translates as well as `1111` (27.7)", ZHU, "Table 2", "translation",
          AsGood(f"{_PARTS[0]}0010+deformable", f"{_PARTS[0]}1111", 1.0, p=0.001),
          "1,500 updates; the paper has 100,000"),
    Claim("dynamic convolution translates as well as attention", ZHU, "Table 3", "translation",
          AsGood(f"{_PARTS[0]}dynamic", f"{_PARTS[0]}1111", 1.0), _SHORT),
    Claim("'0010 + deformable' is ahead of `1111` in detection (40.8, 38.8)", ZHU, "Table 2", "deformable",
          Above("0010+deformable", "1111", 2.0)),
    Claim("deformable convolution is ahead of plain convolution (39.9, 36.4)", ZHU, "Table 2", "deformable",
          Above("deformable", "plain", 3.5)),
    Claim("the key's content adds to deformable convolution (40.8, 39.9)", ZHU, "Table 2", "deformable",
          Above("0010+deformable", "deformable", 0.9)),
    Claim("`1111` is ahead of no attention (38.8, 36.4)", ZHU, "Table 2", "deformable", Above("1111", "plain", 2.4)),
    Claim("'0010 + deformable' takes fewer operations than `1111`", ZHU, "Table 2", "deformable",
          Above("1111/operations", "0010+deformable/operations"),
          "M multiply-adds; on maps as small as these attention over all pairs is cheap"),
    Claim("dynamic convolution is behind ε2 in detection and segmentation", ZHU, "Table 3", "",
          Beyond("no study: kernels of 13 and more cover these small maps whole, where the paper's are local")),
    Claim("in self-attention on images `0110` is as good as `1111`", ZHU, "4.2 (3), Fig. 3a",
          "vision-transformers", AsGood("crops/vit-0110", "crops/vit-1111", 1.0),
          "in a vision transformer, not in a CNN"),
)  # fmt: skip

BELLO_CLAIMS = (
    Claim("an augmented network is ahead of the plain one (81.6, 80.3)", BELLO, "Table 1", "classifier",
          Above("photograph crops/augmented", "photograph crops/plain", 1.3), "32×32 crops"),
    Claim("an augmented network is ahead of the plain one (81.6, 80.3)", BELLO, "Table 1", "classifier",
          Above("digits/augmented", "digits/plain", 1.3), "16×16 digits: 99 % are right without it"),
    Claim("relative positions are ahead of none (77.7, 77.5)", BELLO, "Table 7", "augmented",
          Above("crops/relative", "crops/none", 0.2), _ONE_NET),
    Claim("2-D sine is no better than none", BELLO, "Table 7", "augmented", AsGood("crops/none", "crops/sine", 1.0),
          _ONE_NET),
    Claim("CoordConv is no better than none", BELLO, "Tables 7 and 8", "augmented",
          AsGood("crops/none", "crops/coordconv", 1.0), f"{_ONE_NET}; Table 8 is of detection"),
    Claim("attention without positions is already ahead of the plain network (77.5, 76.4)", BELLO, "Table 7",
          "augmented", Above("crops/none", "crops/plain", 1.1), _ONE_NET),
    Claim("attention in all channels is behind a quarter (73.9, 77.7)", BELLO, "Table 6", "augmented",
          Above("crops/relative", "crops/share-1.0", 3.8), _ONE_NET),
    Claim("attention in three quarters of the channels is as good as the plain network (76.7, 76.4)", BELLO,
          "Table 6", "augmented", AsGood("crops/share-0.75", "crops/plain", 1.0), _ONE_NET),
    Claim("in a network of attention alone relative positions gain more (2.8)", BELLO, "Fig. 4", "augmented",
          Above("crops/share-1.0", "crops/none-share-1.0", 2.8), _ONE_NET),
    Claim("augmented ResNets and MnasNets are ahead on ImageNet, and RetinaNet on COCO", BELLO, "Tables 2 to 5, 8", "",
          Beyond("differences of 0.2 to 1.4 points of networks trained on a million pictures")),
)  # fmt: skip

_STAGE = "self-critical"
THESIS_CLAIMS = (
    Claim("ETA is ahead of regions alone (126.6, 124.1)", THESIS, "Table 2.5", "captioning",
          Above(f"eta/{_STAGE}", f"visual/{_STAGE}", 2.5), "each modality holds what the other lacks"),
    Claim("ETA is ahead of attributes alone (126.6, 102.8)", THESIS, "Table 2.5", "captioning",
          Above(f"eta/{_STAGE}", f"semantic/{_STAGE}", 23.8), "each modality holds what the other lacks"),
    Claim("ETA is ahead of regions alone (126.6, 124.1)", THESIS, "Table 2.5", "captioning-grid",
          Above(f"eta/{_STAGE}", f"visual/{_STAGE}", 2.5), "both modalities are of one network"),
    Claim("ETA is ahead of attributes alone (126.6, 102.8)", THESIS, "Table 2.5", "captioning-grid",
          Above(f"eta/{_STAGE}", f"semantic/{_STAGE}", 23.8), "both modalities are of one network"),
    Claim("ETA is ahead of parallel attention (126.6, 124.9)", THESIS, "Table 2.5", "fusion",
          Above(f"eta/{_STAGE}", f"parallel/{_STAGE}", 1.7)),
    Claim("ETA is ahead of stacked attention (126.6, 125.0 and 124.5)", THESIS, "Table 2.5", "fusion",
          Every((Above(f"eta/{_STAGE}", f"stacked-visual/{_STAGE}", 1.6),
                 Above(f"eta/{_STAGE}", f"stacked-semantic/{_STAGE}", 2.1)))),
    Claim("fusing the outputs of both single models is behind ETA (118.7, 126.6)", THESIS, "Table 2.5", "captioning",
          Above(f"eta/{_STAGE}", f"modalities-fused/{_STAGE}", 7.9)),
    Claim("self-critical training raises CIDEr-D (117.9 to 126.6)", THESIS, "Table 2.1", "captioning",
          Above(f"eta/{_STAGE}", "eta/cross-entropy", 8.7)),
    Claim("self-critical training raises CIDEr-D (117.9 to 126.6)", THESIS, "Table 2.1", "captioning-grid",
          Above(f"eta/{_STAGE}", "eta/cross-entropy", 8.7)),
    Claim("true attributes raise ETA far above detected ones (204.2, 117.9)", THESIS, "Table 2.2", "captioning",
          Above("oracle/cross-entropy", "eta/cross-entropy", 86.3)),
    Claim("without encoders captions are worse (96.2 to 93.1, 93.8 to 91.8)", THESIS, "Table 2.4", "captioning",
          Every((Above("semantic/cross-entropy", "semantic-no-encoder/cross-entropy", 3.1),
                 Above("visual/cross-entropy", "visual-no-encoder/cross-entropy", 2.0))), "seeds differ by more"),
    Claim("a saturating gate hurts ETA (115.2 to 104.9 and 104.1)", THESIS, "Table 2.6", "captioning",
          Every((Above("eta/cross-entropy", "gate-sigmoid/cross-entropy", 10.3),
                 Above("eta/cross-entropy", "gate-tanh/cross-entropy", 11.1))), "two layers; the thesis has six"),
    Claim("ETA on MSCOCO, offline and online, beside LSTMs", THESIS, "Tables 2.1 and 2.3", "",
          Beyond("needs MSCOCO and the test server; the recipes are in `configs/fairseq`")),
    Claim("Bi-CC is ahead of CC (80.17, 79.10)", THESIS, "Table 3.2", "paddings", Above("learned-zscore", "cc", 1.07)),
    Claim("padding with -∞ drops (74.98 from 79.66)", THESIS, "Table 3.3", "paddings",
          Above("zero-sqrt_d", "inf-sqrt_d", 4.68), "a window of 15 on maps of 16×20; the thesis' is 31 on 97×97"),
    Claim("a learned padding is ahead of zero (80.17, 79.91 and 79.97, 79.66)", THESIS, "Table 3.3", "paddings",
          Every((Above("learned-zscore", "zero-zscore", 0.26), Above("learned-sqrt_d", "zero-sqrt_d", 0.31)))),
    Claim("normalised logits are ahead of √d (80.17, 79.97)", THESIS, "Table 3.3", "paddings",
          Above("learned-zscore", "learned-sqrt_d", 0.2)),
    Claim("a small window hurts, a larger one is ahead (79.38, 80.17)", THESIS, "Table 3.4", "paddings",
          Every((Above("learned-zscore", "k-3"), Above("k-31", "learned-zscore", 0.79))), "windows of 3, 15, 31"),
    Claim("Bi-CC, put into a trained network, improves it", THESIS, "Table 3.2", "segmentation",
          Above("bi-cc", "fcn", 1.0), "400 steps after 1,000 of the plain network"),
    Claim("bilateral self-attention is ahead of the Transformer (35.93, 35.09)", THESIS, "Table 3.6", "translation",
          Above(f"{_PARTS[0]}bilateral", f"{_PARTS[0]}1111", 0.84), "beside relative positions, not absolute ones"),
    Claim("bilateral self-attention is ahead of self-attention (35.93, 35.09)", THESIS, "Table 3.6",
          "translation-paddings", Above("bilateral", "1000+absolute", 0.84), "both with absolute positions"),
    Claim("padding with the minimum drops (31.28 from 35.93)", THESIS, "Table 3.6", "translation-paddings",
          Above("bilateral", "bilateral-min", 4.65), _SHORT),
    Claim("padding with zero is ahead of -∞ and of a learned value (35.93, 35.43, 35.73)", THESIS, "Table 3.6",
          "translation-paddings",
          Every((Above("bilateral", "bilateral-inf", 0.5), Above("bilateral", "bilateral-learned", 0.2))), _SHORT),
    Claim("windows of 21 and 11 are the best of bilateral self-attention", THESIS, "Table 3.7", "",
          Beyond("differences of 0.2 to 0.6 BLEU, of windows longer than most of these entries")),
    Claim("Bi-NL and Bi-CC on Cityscapes and ADE20K", THESIS, "Table 3.1", "",
          Beyond("needs both sets; the configs are in `configs/mmseg/bilateral`")),
    Claim("sharing the projections hurts (79.72 to 79.21)", THESIS, "Table 4.2, e and h", "sharing",
          Above("e-unshared", "h-shared", 0.51)),
    Claim("refinement brings it back (79.21 to 79.90)", THESIS, "Table 4.2, h and i", "sharing",
          Above("i-shared-refined", "h-shared", 0.69)),
    Claim("content with refinement is ahead of content alone (79.08, 78.8)", THESIS, "Table 4.2, g and a", "sharing",
          Above("g-content-shared-refined", "a-content", 0.28)),
    Claim("content and geometry together are ahead of each alone (79.72, 78.8, 77.3)", THESIS, "Table 4.2, a, b, e",
          "sharing", Every((Above("e-unshared", "a-content", 0.92), Above("e-unshared", "b-geometric", 2.42)))),
    Claim("local bilateral attention is ahead of the 3×3 convolution (79.72, 79.14)", THESIS, "Table 4.2, e and j",
          "sharing", Above("e-unshared", "j-conv", 0.58)),
    Claim("shared and refined, it takes fewer operations than the convolution", THESIS, "Table 4.2, i and j", "sharing",
          Above("j-conv/operations", "i-shared-refined/operations"), "M multiply-adds of the whole network"),
    Claim("U-Net with bilateral attention on HELEN and LFW-PL", THESIS, "Tables 4.3 and 4.4", "",
          Beyond("needs both sets; the configs are in `configs/mmseg/local_bilateral`")),
)  # fmt: skip

LECTURE_CLAIMS = (
    Claim("DETR converges slowly, Deformable DETR does not", LECTURE, "slide Deformable DETR", "detection",
          Every((Above("deformable-detr", "detr"), Above("deformable-detr-1level", "detr"))), "mAP after 40 epochs"),
    Claim("DETR converges slowly: a training three times as long helps", LECTURE, "slide Deformable DETR", "detection",
          Above("detr-120e", "detr"), "mAP after 120 and 40 epochs"),
    Claim("attention over space and time is ahead of space alone where order matters", LECTURE, "slide TimeSformer",
          "space-time", Every((Above("two-directions/divided", "two-directions/space"),
                               Above("four-directions/divided", "four-directions/space"))),
          "the slide compares patterns without figures; the class is the direction of a movement"),
    Claim("windows that shift see beyond their borders", LECTURE, "slide Swin Transformer", "vision-transformers",
          Above("crops/swin", "crops/swin-unshifted"), "accuracy with and without the shift"),
    Claim("vision transformers are comparable to CNNs on ImageNet", LECTURE, "slide Vision Transformer", "",
          Beyond("transformers need more pictures than any set that packages bring")),
    Claim("Mask2Former leads image segmentation", LECTURE, "slide Mask2Former", "",
          Beyond("a comparison on COCO, ADE20K and Cityscapes; it trains on digits in the study `detection`")),
)  # fmt: skip

CLAIMS = (*ZHU_CLAIMS, *BELLO_CLAIMS, *THESIS_CLAIMS, *LECTURE_CLAIMS)
