//! Fixed 2-d sine position encoding of a feature map.

use crate::tensor::{Device, Kind, Tensor};

/// Sines and cosines of each cell's row and column, each in a quarter of the channels. Wavelengths are 1 to 32 times
/// the map. Cells are in row-major order, values in -1..=1.
///
/// # Shapes
/// `[h w, c]` fp32; `c` is a multiple of 4.
pub fn sine_positions(h: i64, w: i64, c: i64, device: Device) -> Tensor {
    let options = (Kind::Float, device);
    let quarter = c / 4;
    let frequency = Tensor::linspace(0.0, -(32.0_f64.ln()), quarter, options).exp() * std::f64::consts::PI;
    let axis = |cells: i64| {
        let half = 1.0 - 1.0 / f64::from(i32::try_from(cells).expect("a few hundred cells"));
        Tensor::linspace(-half, half, cells, options).unsqueeze(-1) * &frequency
    };
    let rows = axis(h).unsqueeze(1).expand([h, w, quarter], false);
    let columns = axis(w).unsqueeze(0).expand([h, w, quarter], false);
    Tensor::cat(&[rows.sin(), rows.cos(), columns.sin(), columns.cos()], -1).view([h * w, c])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_a_different_position() {
        let positions = sine_positions(12, 16, 32, Device::Cpu);
        assert_eq!(positions.size(), [12 * 16, 32]);
        let distances = Tensor::cdist(&positions, &positions, 2.0, None);
        let distances = distances + Tensor::eye(12 * 16, (Kind::Float, Device::Cpu)) * 9.0;
        assert!(distances.min().double_value(&[]) > 0.1);
        // the centre of the map is 0, so the sines of mirrored cells are opposite
        let sines = positions.narrow(1, 0, 8);
        assert!((sines.get(0) + sines.get(12 * 16 - 1)).abs().max().double_value(&[]) < 1e-5);
    }
}
