//! `prsmed serve` as a process on loopback: every route, every limit, bad clients, load.

mod limits;
mod load;
mod routes;
mod support;
