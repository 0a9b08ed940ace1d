//! Classical augmentation: flips, rotations, elastic deformation, intensity, noise, blur, gamma.
