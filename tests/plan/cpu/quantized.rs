//! Matrices quantized to 4 bits.

use super::*;
use prsmed::tensor::nf4::Nf4;

const NAME: &str = "prsmed_nf4::dequantize";
/// Shapes with whole and with partial blocks of scales.
const SHAPES: [[i64; 2]; 3] = [[256, 128], [96, 64], [10, 37]];

fn matrix(shape: [i64; 2], is_double: bool, on: Device) -> Nf4 {
    let matrix = Nf4::empty(shape, is_double, on);
    matrix.quantize(&zeros(&shape, BF16, on));
    matrix
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for is_double in [false, true] {
            for kind in FLOATS {
                let what = format!("{shape:?} {kind:?}, double {is_double}");
                cases.push(case(NAME, what.clone(), move |on| {
                    let matrix = matrix(shape, is_double, on);
                    plain(move || matrix.dequantize(kind))
                }));
                for size in [vec![12, shape[1]], vec![2, 6, shape[1]]] {
                    cases.extend(passes(NAME, &format!("linear {size:?}, {what}"), move |on| {
                        let (matrix, xs) = (matrix(shape, is_double, on), leaf(&size, kind, on));
                        (vec![xs.shallow_clone()], move || matrix.linear(&xs, None))
                    }));
                }
                cases.extend(passes(NAME, &format!("linear with a bias, {what}"), move |on| {
                    let (matrix, xs) = (matrix(shape, is_double, on), leaf(&[12, shape[1]], kind, on));
                    let bias = leaf(&[shape[0]], kind, on);
                    (vec![xs.shallow_clone(), bias.shallow_clone()], move || matrix.linear(&xs, Some(&bias)))
                }));
            }
        }
        for kind in FLOATS {
            cases.push(case("aten::sum", format!("scales of {shape:?} {kind:?} as it is read"), move |on| {
                let matrix = Nf4::empty(shape, true, on);
                Box::new(move || {
                    matrix.dry_run_quantization(kind);
                    Vec::new()
                })
            }));
        }
    }
    cases
}
