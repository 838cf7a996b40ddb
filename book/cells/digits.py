# @title The digits of scikit-learn
from sklearn.datasets import load_digits

digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)  # f32[1797, 8, 8, 1]
labels = digits.target.astype(np.int32)  # i32[1797]
order = np.random.default_rng(0).permutation(len(labels))
train, valid = order[:1536], order[1536:]  # indices: 1,536 to train on, 261 to validate
