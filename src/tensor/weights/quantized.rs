//! Matrices in 4 bits from files: dense ones are quantized as they are read, one after the other, those that are in 4 bits
//! (ours, or written by `transformers` with `bitsandbytes`) are read as they are.

use super::{Archive, LoadReport, MisShaped};
use crate::error::{Error, Result};
use crate::tensor::nf4::{Nf4, STATE, State};
use crate::tensor::{Device, Kind, Tensor, ledger, no_grad};
use std::rc::Rc;

const HINT: &str = "use weights in bf16, or in bitsandbytes' nf4 with blocks of 64 and u8 storage";
/// Where `bitsandbytes` keeps the state of its other 4-bit type.
const OTHER_STATE: &str = ".quant_state.bitsandbytes__fp4";

impl Archive {
    /// Whether `name` is stored in 4 bits.
    pub fn is_quantized(&self, name: &str) -> bool {
        self.contains(&format!("{name}{STATE}"))
    }

    /// What is stored about the 4-bit matrix `name`; `None` when it is stored in another way.
    pub(super) fn quantized_state(&self, name: &str) -> Result<Option<State>> {
        if self.contains(&format!("{name}{OTHER_STATE}")) {
            return Err(Error::weights(self.path(), format!("`{name}` is stored in fp4"), HINT));
        }
        if !self.is_quantized(name) {
            return Ok(None);
        }
        let key = format!("{name}{STATE}");
        let bytes = Vec::<u8>::try_from(self.read(&key)?).unwrap_or_default();
        let state = State::parse(&bytes);
        state.map(Some).map_err(|reason| Error::weights(self.path(), format!("`{key}` {reason}"), HINT))
    }

    /// Reads the 4-bit matrix `name`, whose state is `state`, into one of the same scheme and shape.
    fn read_quantized(&self, name: &str, state: &State, into: &Nf4) -> Result<()> {
        for (key, piece) in into.pieces().into_iter().filter(|(key, _)| *key != STATE) {
            let key = format!("{name}{key}");
            let stored = self.info(&key).map(|info| (info.kind, info.shape.clone()));
            if stored != Some((piece.kind(), piece.size())) {
                let reason = format!("`{key}` is {stored:?}, expected {:?} {:?}", piece.kind(), piece.size());
                return Err(Error::weights(self.path(), reason, HINT));
            }
            self.copy_into(&key, &mut piece.shallow_clone())?;
        }
        let adopted = into.adopt(state);
        adopted.map_err(|reason| Error::weights(self.path(), format!("`{name}` {reason}"), HINT))
    }

    /// The 4-bit matrix `name` as a dense one in fp32, on the host.
    fn read_dequantized(&self, name: &str, state: &State) -> Result<Tensor> {
        let shape = [state.shape[0], state.shape[1]];
        let matrix = Nf4::empty(shape, state.scheme() == crate::tensor::nf4::Quantization::Nf4Double, Device::Cpu);
        self.read_quantized(name, state, &matrix)?;
        Ok(matrix.dequantize(Kind::Float))
    }

    /// Copies the 4-bit matrix `name` into a dense `target`.
    pub(super) fn fill_dense(&self, name: &str, state: &State, target: &mut Tensor) -> Result<()> {
        let dense = self.read_dequantized(name, state)?;
        no_grad(|| target.copy_(&dense));
        Ok(())
    }

    /// Fills `matrix` from what is stored under `name`, dense or in 4 bits.
    pub(super) fn fill_quantized(&self, name: &str, matrix: &Rc<Nf4>, report: &mut LoadReport) -> Result<()> {
        let state = self.quantized_state(name)?;
        let stored = state.as_ref().map(|s| s.shape.clone()).or_else(|| self.info(name).map(|info| info.shape.clone()));
        let expected = matrix.shape().to_vec();
        let _category = ledger::enter(ledger::Category::Workspace);
        match (stored, state) {
            (Some(shape), Some(state)) if shape == expected && state.scheme() == matrix.scheme() => {
                self.read_quantized(name, &state, matrix)?;
            }
            (Some(shape), Some(state)) if shape == expected => matrix.quantize(&self.read_dequantized(name, &state)?),
            (Some(shape), None) if shape == expected => matrix.quantize(&self.read_float(name)?),
            (found, _) => {
                let zeros = Tensor::zeros(matrix.shape(), (Kind::BFloat16, Device::Cpu));
                matrix.quantize(&zeros);
                match found {
                    None => report.missing.push(name.to_owned()),
                    Some(got) => report.mis_shaped.push(MisShaped { name: name.to_owned(), expected, got }),
                }
                return Ok(());
            }
        }
        report.loaded.push(name.to_owned());
        Ok(())
    }

    /// `name` in its stored type where that can be quantized, else in fp32.
    fn read_float(&self, name: &str) -> Result<Tensor> {
        let dense = self.read(name)?;
        let fits = matches!(dense.kind(), Kind::BFloat16 | Kind::Half | Kind::Float);
        Ok(if fits { dense } else { dense.to_kind(Kind::Float) })
    }
}

/// The weight that a piece `name` of a 4-bit matrix belongs to.
pub(super) fn weight_of(name: &str) -> Option<&str> {
    let keys = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE];
    keys.iter().find_map(|key| name.strip_suffix(key))
}
