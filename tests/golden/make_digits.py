"""Makes tests/golden/digits.npz: 1,797 handwritten digits of 8 x 8, in scikit-learn's order.

They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak 1998, UCI Machine Learning
Repository, CC BY 4.0) as scikit-learn 1.9.1 brings it: `x` (S, 8, 8) uint8 from 0 to 16, `y` (S,) uint8.

Run once, with an interpreter that has scikit-learn: python tests/golden/make_digits.py
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

if __name__ == "__main__":
    digits = load_digits()
    np.savez_compressed(
        Path(__file__).with_name("digits.npz"), x=digits.images.astype(np.uint8), y=digits.target.astype(np.uint8)
    )
