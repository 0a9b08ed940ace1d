//! Distances between sets of features: FID, KID, MMD.
