//! InceptionV3 as the features of FID and KID.
