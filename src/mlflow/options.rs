//! Address and credentials of an MLflow server.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

/// A tracking server and the experiment on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlflowOptions {
    /// Address of the server, for example `http://127.0.0.1:5000`.
    pub url: String,
    /// Name of the experiment; it is created if it does not exist.
    pub experiment: String,
    /// Credentials; `None` for a server without access control.
    pub credentials: Option<Credentials>,
}

/// Value of the header `Authorization`. It is not shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials(pub(super) String);

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(...)")
    }
}

impl Credentials {
    /// The credentials of MLflow's own client: `MLFLOW_TRACKING_TOKEN`, else `MLFLOW_TRACKING_USERNAME` and
    /// `MLFLOW_TRACKING_PASSWORD`. `var` looks up a variable.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let token = var("MLFLOW_TRACKING_TOKEN").map(|token| format!("Bearer {token}"));
        let basic = || {
            let password = var("MLFLOW_TRACKING_PASSWORD").unwrap_or_default();
            let user = var("MLFLOW_TRACKING_USERNAME")?;
            Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
        };
        token.or_else(basic).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_those_of_mlflows_own_client() {
        let with = |vars: &[(&str, &str)]| {
            let look_up = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
            Credentials::from_vars(look_up).map(|Credentials(value)| value)
        };
        assert_eq!(with(&[]), None);
        let user = [("MLFLOW_TRACKING_USERNAME", "user"), ("MLFLOW_TRACKING_PASSWORD", "secret")];
        assert_eq!(with(&user).as_deref(), Some("Basic dXNlcjpzZWNyZXQ="));
        assert_eq!(with(&[user[0], ("MLFLOW_TRACKING_TOKEN", "t")]).as_deref(), Some("Bearer t"));
        assert_eq!(format!("{:?}", Credentials("Bearer t".into())), "Credentials(...)");
    }
}
