//! Environment variables by which the processes of a job find each other: those of `torchrun` and Slurm, and own ones.

use super::Rendezvous;
use prsmed_base::{Error, Result};
use prsmed_tensor::collective::StoreAddress;
use std::time::Duration;

/// Longest time of a collective operation, as in PyTorch. A failed process is noticed much earlier, see [`super::monitor`].
const TIMEOUT: Duration = Duration::from_mins(30);
/// Most processes of a job.
const MOST: usize = 4096;
/// Variable with the key of the job. Processes that do not know it cannot take part.
pub const JOB_KEY: &str = "PRSMED_JOB_KEY";
/// Variable with the listening socket that the launcher has opened for the store.
pub const STORE_FD: &str = "PRSMED_STORE_FD";
/// Variable with the address on which the store listens, if it is not `MASTER_ADDR`.
pub const STORE_ADDR: &str = "PRSMED_STORE_ADDR";

impl Rendezvous {
    /// How this process joins a job, from the variables of `torchrun` or Slurm that `var` looks up; `None` if it is alone.
    ///
    /// # Errors
    /// [`Error::Config`] for a variable that is missing or not a number.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let number = |name: &str| -> Result<Option<usize>> {
            let wrong = |text: &str| {
                let hint = "start the processes with `torchrun`, `srun` or the argument `gpus`, which set it";
                Error::config(name, format!("`{text}` is not a number"), hint)
            };
            var(name).map(|text| text.trim().parse().map_err(|_| wrong(&text))).transpose()
        };
        let missing = |name: &str| Error::config(name, "the variable is not set", "set it, as `torchrun` does");
        let found = if let Some(rank) = number("RANK")? {
            let size = number("WORLD_SIZE")?.ok_or_else(|| missing("WORLD_SIZE"))?;
            let host = var("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR"))?;
            let port = number("MASTER_PORT")?.ok_or_else(|| missing("MASTER_PORT"))?;
            (rank, size, number("LOCAL_RANK")?.unwrap_or(rank), host, port)
        } else if var("SLURM_STEP_ID").is_some() {
            // in a job script without `srun` there is no step, and one process only
            let size = number("SLURM_STEP_NUM_TASKS")?.unwrap_or(1);
            let rank = number("SLURM_PROCID")?.unwrap_or(0);
            let host = var("MASTER_ADDR").or_else(|| var("SLURM_LAUNCH_NODE_IPADDR"));
            let host = host.ok_or_else(|| missing("MASTER_ADDR"))?;
            // jobs on the same machine get other ports
            let port = number("MASTER_PORT")?.unwrap_or(20_000 + number("SLURM_JOB_ID")?.unwrap_or(0) % 20_000);
            (rank, size, number("SLURM_LOCALID")?.unwrap_or(0), host, port)
        } else {
            return Ok(None);
        };
        let (rank, size, local_rank, host, port) = found;
        if size <= 1 {
            return Ok(None);
        }
        if rank >= size {
            let hint = "start the processes with `torchrun`, `srun` or the argument `gpus`";
            return Err(Error::config("RANK", format!("rank {rank} of {size} processes, counted from 0"), hint));
        }
        let port =
            u16::try_from(port).map_err(|_| Error::config("MASTER_PORT", format!("{port} is no port"), "use 29500"))?;
        if size > MOST {
            let reason = format!("{size} processes are too many; {MOST} can work together");
            return Err(Error::config("WORLD_SIZE", reason, "start one process for each GPU"));
        }
        let agent = var("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let attempt = number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
        // whoever does not know the key finds none of the job's values in the store
        let key = var(JOB_KEY).unwrap_or_default();
        let address = StoreAddress { host, port, prefix: format!("prsmed/{attempt}/{key}") };
        let interface = var("GLOO_SOCKET_IFNAME").filter(|name| !name.is_empty());
        let is_server = rank == 0 && !agent;
        let listener = number(STORE_FD)?.and_then(|descriptor| i32::try_from(descriptor).ok());
        let wrong =
            |text: &str| Error::config(STORE_ADDR, format!("`{text}` is not an IP address"), "use for example 0.0.0.0");
        let bind = var(STORE_ADDR).map(|text| text.trim().parse().map_err(|_| wrong(&text))).transpose()?;
        Ok(Some(Self { rank, size, local_rank, address, is_server, listener, bind, interface, timeout: TIMEOUT }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn read(vars: &[(&str, &str)]) -> Result<Option<Rendezvous>> {
        let vars: HashMap<_, _> = vars.iter().copied().collect();
        Rendezvous::from_vars(|name| vars.get(name).map(|value| (*value).to_owned()))
    }

    const TORCHRUN: [(&str, &str); 5] =
        [("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29501")];

    #[test]
    fn variables_of_torchrun_are_read() {
        let found = read(&TORCHRUN).unwrap().unwrap();
        assert_eq!((found.rank, found.size, found.local_rank, found.is_server), (3, 4, 1, false));
        assert_eq!((found.address.host.as_str(), found.address.port), ("node0", 29501));
        let agent = [&TORCHRUN[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "2")]];
        let mut agent = agent.concat();
        agent[0].1 = "0";
        let first = read(&agent).unwrap().unwrap();
        assert!(!first.is_server, "the agent has the server");
        assert_ne!(first.address.prefix, found.address.prefix, "each attempt has its own keys");
        let with_key = read(&[&TORCHRUN[..], &[(JOB_KEY, "secret")]].concat()).unwrap().unwrap();
        assert_ne!(with_key.address.prefix, found.address.prefix, "each job has its own keys");
    }

    #[test]
    fn variables_of_slurm_are_read_within_a_step_only() {
        let step = [
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "70001"),
            ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7"),
        ];
        assert_eq!(read(&step).unwrap(), None);
        let found = read(&[&step[..], &[("SLURM_STEP_ID", "0")]].concat()).unwrap().unwrap();
        assert_eq!((found.rank, found.size, found.local_rank), (1, 2, 1));
        assert_eq!((found.address.host.as_str(), found.address.port), ("10.0.0.7", 30_001));
    }

    #[test]
    fn one_process_is_no_job_and_wrong_variables_are_named() {
        assert_eq!(read(&[]).unwrap(), None);
        let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        assert_eq!(read(&alone).unwrap(), None);
        for (left_out, key) in [(2, "WORLD_SIZE"), (3, "MASTER_ADDR"), (4, "MASTER_PORT")] {
            let mut vars = TORCHRUN.to_vec();
            vars.remove(left_out);
            assert!(read(&vars).unwrap_err().to_string().starts_with(&format!("`{key}`: ")));
        }
        let mut vars = TORCHRUN.to_vec();
        vars[0].1 = "4";
        assert_eq!(read(&vars).unwrap_err().to_string(), "`RANK`: rank 4 of 4 processes, counted from 0");
        vars[0].1 = "first";
        assert_eq!(read(&vars).unwrap_err().to_string(), "`RANK`: `first` is not a number");
        vars[0].1 = "3";
        vars[2].1 = "1000000";
        let error = read(&vars).unwrap_err().to_string();
        assert_eq!(error, "`WORLD_SIZE`: 1000000 processes are too many; 4096 can work together");
    }
}
