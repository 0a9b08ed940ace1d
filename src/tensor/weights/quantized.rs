//! NF4 matrices in checkpoints. Dense weights are quantized while they are read, one at a time. Weights that are stored
//! in NF4, by this crate or by `transformers` with `bitsandbytes`, are read unchanged.

use super::{Archive, LoadReport, MisShaped, TensorInfo, torch};
use crate::nf4::{Nf4, Nf4State, STATE};
use crate::{Device, Kind, Shared, Tensor, ledger, no_grad};
use prsmed_base::error::{Error, Result};

const HINT: &str = "use weights in bf16, or in bitsandbytes' nf4 with blocks of 64 and u8 storage";
/// Key of the state of `bitsandbytes`' other 4-bit format.
const OTHER_STATE: &str = ".quant_state.bitsandbytes__fp4";

impl Archive {
    /// True if `name` is stored in NF4.
    pub fn is_quantized(&self, name: &str) -> bool {
        self.contains(&format!("{name}{STATE}"))
    }

    /// The NF4 state of the matrix `name`; `None` if it is not stored in NF4.
    pub(super) fn quantized_state(&self, name: &str) -> Result<Option<Nf4State>> {
        if self.contains(&format!("{name}{OTHER_STATE}")) {
            return Err(Error::weights(self.path(), format!("`{name}` is stored in fp4"), HINT));
        }
        if !self.is_quantized(name) {
            return Ok(None);
        }
        let key = format!("{name}{STATE}");
        let bytes = Vec::<u8>::try_from(self.read(&key)?).unwrap_or_default();
        let state = Nf4State::parse(&bytes);
        state.map(Some).map_err(|reason| Error::weights(self.path(), format!("`{key}` {reason}"), HINT))
    }

    /// Reads the NF4 matrix `name` with the given `state` into one of the same format and shape.
    fn read_quantized(&self, name: &str, state: &Nf4State, into: &Nf4) -> Result<()> {
        for (key, piece) in into.pieces().into_iter().filter(|(key, _)| *key != STATE) {
            let key = format!("{name}{key}");
            let stored = self.info(&key).map(|info| (info.kind, info.shape.clone()));
            if stored != Some((piece.kind(), piece.size())) {
                let reason = format!("`{key}` is {stored:?}, expected {:?} {:?}", piece.kind(), piece.size());
                return Err(Error::weights(self.path(), reason, HINT));
            }
            self.copy_into(&key, &mut piece.shallow_clone())?;
        }
        let adopted = into.load_state(state);
        adopted.map_err(|reason| Error::weights(self.path(), format!("`{name}` {reason}"), HINT))
    }

    /// Dequantizes the NF4 matrix `name` to fp32 on the CPU.
    fn read_dequantized(&self, name: &str, state: &Nf4State) -> Result<Tensor> {
        let shape = [state.shape[0], state.shape[1]];
        let matrix = Nf4::empty(shape, state.scheme() == crate::nf4::Quantization::Nf4Double, Device::Cpu);
        self.read_quantized(name, state, &matrix)?;
        Ok(matrix.dequantize(Kind::Float))
    }

    /// Dequantizes the NF4 matrix `name` into a dense `target`.
    pub(super) fn fill_dense(&self, name: &str, state: &Nf4State, target: &mut Tensor) -> Result<()> {
        let dense = self.read_dequantized(name, state)?;
        no_grad(|| target.copy_(&dense));
        Ok(())
    }

    /// Fills `matrix` from the weight `name`, which is stored dense or in NF4.
    pub(super) fn fill_quantized(&self, name: &str, matrix: &Shared<Nf4>, report: &mut LoadReport) -> Result<()> {
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

    /// Reads the finite values of `name` in their stored dtype if that can be quantized, else in fp32.
    fn read_float(&self, name: &str) -> Result<Tensor> {
        let TensorInfo { kind, shape } = &self.entry(name)?.info;
        let kind = if matches!(kind, Kind::BFloat16 | Kind::Half) { *kind } else { Kind::Float };
        let mut dense = Tensor::f_empty(shape, (kind, Device::Cpu)).map_err(|error| torch(&error))?;
        self.copy_into(name, &mut dense)?;
        Ok(dense)
    }
}

/// The weight to which the tensor `name` of an NF4 matrix belongs.
pub(super) fn weight_of(name: &str) -> Option<&str> {
    let keys = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE];
    keys.iter().find_map(|key| name.strip_suffix(key))
}
