//! Does it help? Trainings with and without, compared.
